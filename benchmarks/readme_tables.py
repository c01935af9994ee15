"""Writes the tables in README.md from the figures that first_figures.py measured:

python benchmarks/readme_tables.py benchmarks/results/first_figures_h200.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
VARIANTS = {
    "gnsilu": "gnsilu",
    "pytorch_fp32": "PyTorch, FP32 inside (autocast)",
    "pytorch_16_bit": "PyTorch, 16-bit",
}


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ruler(row: dict[str, Any]) -> float:
    """The faster of the two copies."""
    return float(min(row["copy"]["median"], row["copy_kernel"]["median"]))


def speed(figures: dict[str, Any]) -> str:
    rows = []
    for row in figures["device_time"]:
        copy = ruler(row)
        times = [f"x{row[variant]['median'] / copy:.2f}" for variant in VARIANTS]
        rows.append(["x".join(map(str, row["shape"])), f"{copy:.1f} us", *times])
    return table(["x (N,C,H,W)", "copy", *VARIANTS.values()], rows)


def exactness(figures: dict[str, Any]) -> str:
    rows = []
    for dtype in ("bfloat16", "float16"):
        of_dtype = [row for row in figures["exactness"] if row["dtype"] == dtype]
        for name in dict.fromkeys(row["input"] for row in of_dtype):
            cells = []
            for side in ("gnsilu", "pytorch"):
                found = [row[side] for row in of_dtype if row["input"] == name]
                share = sum(f["correct"] for f in found) / sum(f["elements"] for f in found)
                worst = max(f["max_of_bound"] for f in found)
                cells += [f"{100 * share:.4f} %", f"{worst:.2f}"]
            rows.append([dtype, name, *cells])
    return table(
        ["dtype", "x", "gnsilu: correctly rounded", "worst / bound", "PyTorch", "worst / bound"],
        rows,
    )


def caption(figures: dict[str, Any]) -> str:
    made = figures["environment"]
    return (
        f"{made['device']}, driver {made['driver']}, CUDA {made['cuda']}, torch {made['torch']}, "
        f"{made['date']}, by `benchmarks/first_figures.py`"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tables in README.md.")
    parser.add_argument("figures", type=Path, help="the JSON file that first_figures.py wrote")
    figures = json.loads(parser.parse_args().figures.read_text("utf-8"))
    text = README.read_text("utf-8")
    for name, content in (("speed", speed(figures)), ("exactness", exactness(figures))):
        block = f"<!-- {name} -->\n{content}\n\n{caption(figures)}\n<!-- end -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.S
        )
        if count != 1:
            sys.exit(f"README.md has no block <!-- {name} --> ... <!-- end -->")
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
