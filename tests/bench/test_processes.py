import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from thinwire.bench.processes import RankFailed, run_processes

ENVIRONMENT = dict(os.environ)


def _python(*scripts: str) -> list[list[str]]:
    return [[sys.executable, "-c", script] for script in scripts]


def test_every_process_has_its_environment_and_its_output_comes_back() -> None:
    script = "import os; print('rank', os.environ['RANK'])"
    outputs = run_processes(
        _python(script, script), [{**ENVIRONMENT, "RANK": "0"}, {**ENVIRONMENT, "RANK": "1"}], timeout=30
    )
    assert outputs == ["rank 0\n", "rank 1\n"]


def test_a_failure_ends_the_others_and_names_its_rank_and_last_words() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 1 \(exit code 3\): no such luck$"):
        run_processes(
            _python("import time; time.sleep(60)", "import sys; sys.stderr.write('no such luck\\n'); sys.exit(3)"),
            [ENVIRONMENT] * 2,
            timeout=30,
        )
    assert time.monotonic() - begin < 30


def test_ranks_that_do_not_finish_are_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 did not finish within 1 s"):
        run_processes(_python("", "import time; time.sleep(60)"), [ENVIRONMENT] * 2, timeout=1)


def test_no_process_outlives_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.bench import processes

    started: list[int] = []

    def interrupted(running: list[object], *_: object) -> None:
        started.extend(process.pid for process in running)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_processes(_python("import time; time.sleep(60)"), [ENVIRONMENT], timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_a_signal_to_its_parent(number: int) -> None:
    child = "import os, time; print(os.getpid(), file=open(os.environ['NOTE'], 'w'), flush=True); time.sleep(60)"
    parent = (
        "import os, sys; from thinwire.bench.processes import run_processes;"
        "run_processes([[sys.executable, '-c', sys.argv[1]]], [dict(os.environ)], timeout=60)"
    )
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "pid")
        command = [sys.executable, "-c", parent, child]
        with subprocess.Popen(command, env={**ENVIRONMENT, "NOTE": str(note)}) as process:
            while not (note.exists() and note.read_text().strip()):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text()), 0)
