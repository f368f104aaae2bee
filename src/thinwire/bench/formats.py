"""`thinwire bench formats`: what formats keep of standard normal numbers, and what encoding costs.

For every format and op, on one thread: the median time of the compiled kernel into existing buffers over the
median time of `copy_` of as many float32 numbers, the two timed alternately; and whether the compiled bits
equal the eager ones. A ratio of 1 means that encoding moves at memory speed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from thinwire import formats
from thinwire.formats import Format
from thinwire.usage import Parser, whole_number


@dataclass(frozen=True)
class Row:
    """One format and op."""

    format: str
    op: str
    ratio_to_copy: float
    same_bits: bool
    bytes_per_element: float
    error: float
    """Of the decoded numbers, over the norm of the numbers, which are standard normal."""


def main(argv: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = Parser(prog="thinwire bench formats", description=__doc__.split("\n")[0])
    parser.add_argument(
        "formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(formats.names())} (default: all)"
    )
    parser.add_argument(
        "--mib", type=whole_number(1, 4096), default=64, help="size of the float32 tensor (default 64)"
    )
    parser.add_argument(
        "--repeats", type=whole_number(1, 1000), default=15, help="timed calls per op (default 15)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    try:
        chosen = [formats.get(name) for name in arguments.formats or formats.names()]
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    rows = []
    for format in chosen:
        for row in measure(format, numel=arguments.mib << 18, repeats=arguments.repeats):
            rows.append(row)
            if not arguments.json:
                same = "" if row.same_bits else "  compiled and eager bits DIFFER"
                kept = f"{row.bytes_per_element:7.4f} bytes  error {row.error:.4f}"
                print(f"{row.format:18} {kept}  {row.op:11} {row.ratio_to_copy:6.2f} x copy{same}", flush=True)
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "threads": 1, "rows": [asdict(row) for row in rows]}))
    return 0 if all(row.same_bits for row in rows) else 1


def measure(format: Format, *, numel: int, repeats: int) -> list[Row]:
    """Time encode, decode and decode_add of `numel` float32 numbers."""
    spans = (numel,)
    compiled = format.compiled(numel)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    buffer = torch.empty(format.nbytes(spans), dtype=torch.uint8)

    def bits(run: Format, op: str) -> torch.Tensor:
        buffer.zero_()
        run.encode(x, buffer, spans=spans)
        if op == "encode":
            return buffer.clone()
        target.fill_(1.0)
        (run.decode if op == "decode" else run.decode_add)(buffer, target, spans=spans)
        return target.view(torch.int32).clone()

    ops: dict[str, Callable[[], None]] = {
        "encode": lambda: compiled.encode(x, buffer, spans=spans),
        "decode": lambda: compiled.decode(buffer, target, spans=spans),
        "decode_add": lambda: compiled.decode_add(buffer, target, spans=spans),
    }
    rows = []
    format.encode(x, buffer, spans=spans)
    format.decode(buffer, target, spans=spans)
    error = float((target - x).norm() / x.norm())
    kept = {"bytes_per_element": round(buffer.numel() / numel, 4), "error": round(error, 5)}
    for name, op in ops.items():
        same = torch.equal(bits(compiled, name), bits(format, name))
        ratio = _ratio(op, lambda: target.copy_(x), repeats)
        rows.append(Row(format.name, name, round(ratio, 3), same, **kept))
    return rows


def _ratio(op: Callable[[], object], reference: Callable[[], object], repeats: int) -> float:
    op(), reference()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, series in zip((op, reference), times):
            begin = time.perf_counter()
            call()
            series.append(time.perf_counter() - begin)
    return statistics.median(times[0]) / statistics.median(times[1])
