"""Draws the rows of `thinwire bench fidelity --json` (stdin) for one format as an SVG (stdout).

A panel per step, a group of bars per kind of layer: mean error as it is, in Hadamard and in GIFT coordinates.

    thinwire bench fidelity --run DIR --steps 20 100 600 --formats nvfp4 --json | python docs/figures/fidelity.py
"""

import json
import sys
from statistics import mean

BARS = (
    ("error_euclidean", "as it is", "#9aa5b1"),
    ("error_hadamard", "Hadamard", "#d9a441"),
    ("error_gift", "GIFT", "#2b6cb0"),
)
WIDTH, PANEL, LEFT, BAR = 760, 150, 46, 22


def kind(layer: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `up_proj`."""
    return layer.removesuffix(".weight").rsplit(".", 1)[-1]


def panel(rows: list[dict[str, object]], step: int, kinds: list[str], top: float, largest: float) -> list[str]:
    """One step's bars, from `top` pixels down."""
    height, group = PANEL - 50, (WIDTH - LEFT) / len(kinds)
    base = top + height + 20
    parts = [f'<text x="0" y="{top + 12:.0f}" font-weight="bold">step {step}</text>']
    for tick in range(0, round(largest * 100) + 1, 5):
        y = base - tick / 100 / largest * height
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick / 100:.2f}</text>')
    for number, name in enumerate(kinds):
        x = LEFT + number * group + (group - 3 * BAR) / 2
        layers = [row for row in rows if row["step"] == step and kind(str(row["layer"])) == name]
        for index, (key, _, colour) in enumerate(BARS):
            bar = mean(float(str(row[key])) for row in layers) / largest * height
            left = x + index * BAR
            parts.append(
                f'<rect x="{left:.1f}" y="{base - bar:.1f}" width="{BAR - 3}" height="{bar:.1f}" fill="{colour}"/>'
            )
        parts.append(f'<text x="{x + 1.5 * BAR:.1f}" y="{base + 15:.1f}" text-anchor="middle">{name}</text>')
    return parts


def draw(rows: list[dict[str, object]]) -> str:
    """The whole picture."""
    steps = sorted({int(str(row["step"])) for row in rows})
    kinds = list(dict.fromkeys(kind(str(row["layer"])) for row in rows))
    largest = max(float(str(row[key])) for row in rows for key, _, _ in BARS)
    parts = [
        f'<rect x="{LEFT + 120 * index}" y="0" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LEFT + 120 * index + 17}" y="11">{label}</text>'
        for index, (_, label, colour) in enumerate(BARS)
    ]
    for number, step in enumerate(steps):
        parts += panel(rows, step, kinds, 24 + number * PANEL, largest)
    size = f'viewBox="0 0 {WIDTH} {24 + PANEL * len(steps)}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])


if __name__ == "__main__":
    found = json.load(sys.stdin)["rows"]
    formats = {row["format"] for row in found}
    if len(formats) != 1:
        sys.exit(f"one format makes a figure, got {', '.join(sorted(map(str, formats)))}: choose with --formats")
    sys.stdout.write(draw(found))
