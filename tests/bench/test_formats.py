import json

import pytest

from thinwire.bench import formats as bench


def test_every_op_of_a_format_gets_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["bf16", "fp8_e4m3", "--mib", "1", "--repeats", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["format"], row["op"]) for row in rows] == [
        (name, op) for name in ("bf16", "fp8_e4m3") for op in ("encode", "decode", "decode_add")
    ]
    assert all(row["same_bits"] and row["ratio_to_copy"] > 0 for row in rows)


def test_an_unknown_format_is_answered_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["fp9"])
    assert "unknown format 'fp9'; choose one of fp32, bf16" in capsys.readouterr().err
