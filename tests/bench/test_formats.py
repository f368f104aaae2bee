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
    assert [row["bytes_per_element"] for row in rows] == [2.0] * 3 + [1.0312] * 3
    assert [row["error"] for row in rows] == pytest.approx([0.00166] * 3 + [0.0265] * 3, rel=0.05)


def test_an_unknown_format_is_answered_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["fp9"])
    assert "unknown format 'fp9'; choose one of fp32, bf16" in capsys.readouterr().err
