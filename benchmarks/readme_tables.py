"""Writes the tables in README.md and docs/exactness.md from the figures that were measured.

    python benchmarks/readme_tables.py benchmarks/results/speed_h200.json
    python benchmarks/readme_tables.py benchmarks/results/exactness_h200.json
    python benchmarks/readme_tables.py benchmarks/results/roofline_h200.json

The first fills README.md's table of speed and draws docs/speed.png and docs/bandwidth.png, the
second fills docs/exactness.md and README.md's table of exactness, and draws docs/exactness.png, the
third fills the table in docs/design.md and draws docs/roofline.png.
With --check and no file: whether the tables are those of the files that they name.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# speed.py's contenders.
SPEED_CONTENDERS = {
    "gnsilu": "gnsilu",
    "compiled": "`torch.compile`",
    "autocast": "PyTorch, FP32 inside (autocast)",
    "eager_16_bit": "PyTorch, 16-bit",
}
# exactness.py's contenders.
CONTENDERS = {
    "two_pass": "gnsilu, `two_pass`, `resident`, `ring`",
    "three_pass": "gnsilu, `three_pass`",
    "fallback": "gnsilu, `fallback`",
    "differentiable": "gnsilu, gradient needed",
    "autocast": SPEED_CONTENDERS["autocast"],
    "compiled": "the same, `torch.compile`",
    "eager_16_bit": SPEED_CONTENDERS["eager_16_bit"],
}
TYPES = {"bfloat16": "BF16", "float16": "FP16"}


# --------------------------------------------------------------------------------- formatting


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(correct: int, elements: int) -> str:
    """100 % only where all are correct."""
    if correct == elements:
        return "100 %"
    return f"{min(100 * correct / elements, 99.9999):.4f} %"


def number(value: float) -> str:
    """Two decimals, from 1000 on two digits."""
    if not math.isfinite(value):
        return "∞"
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


# ----------------------------------------------------------------------------------- README.md


def ruler(times: dict[str, Any]) -> float:
    """The faster of the two copies."""
    return float(min(times["copy"]["median"], times["copy_kernel"]["median"]))


def speed(figures: dict[str, Any]) -> str:
    """BF16, cold L2."""
    rows = []
    for row in figures["rows"]:
        if row["dtype"] != "bfloat16":
            continue
        times = row["cold"]
        cells = [
            f"x{times[name]['median'] / ruler(times):.2f}" if name in times else "-"
            for name in SPEED_CONTENDERS
        ]
        shape = "x".join(map(str, row["shape"]))
        rows.append([shape, f"{ruler(times):.1f} us", f"`{row['route']}`", *cells])
    return table(["x (N,C,H,W)", "copy", "route", *SPEED_CONTENDERS.values()], rows)


# --------------------------------------------------------------------------- docs/exactness.md


def in_short(figures: dict[str, Any]) -> str:
    """The least share and the worst error of each contender, over ordinary and over all x."""

    def cell(contender: str, dtype: str, ordinary_only: bool) -> str:
        found = [
            row[contender]
            for row in figures["exactness"]
            if row["dtype"] == dtype and (row["ordinary"] or not ordinary_only)
        ]
        least = min(found, key=lambda f: f["correct"] / f["elements"])
        worst = max(f["max_of_bound"] for f in found)
        return f"{percent(least['correct'], least['elements'])}, {number(worst)}"

    columns = [(dtype, ordinary_only) for dtype in TYPES for ordinary_only in (True, False)]
    rows = [
        [title, *(cell(contender, *column) for column in columns)]
        for contender, title in CONTENDERS.items()
        if contender in figures["exactness"][0]
    ]
    headings = [f"{short}, {what} x" for short in TYPES.values() for what in ("ordinary", "all")]
    missing = [
        f"Not possible there: {CONTENDERS[contender]} ({reason})."
        for contender, reason in figures["missing"].items()
    ]
    return "\n\n".join([table(["computed by", *headings], rows), *missing])


def by_input(figures: dict[str, Any]) -> str:
    found = {(row["input"], row["dtype"]): row for row in figures["exactness"]}
    contenders = [name for name in CONTENDERS if name in figures["exactness"][0]]
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        for contender in contenders:
            cells, wrong = [], []
            for dtype in TYPES:
                error = found[name, dtype][contender]
                of_no_distance = error["mismatched_nonfinite"]
                cells += [
                    percent(error["correct"], error["elements"]),
                    number(math.inf if of_no_distance else error["max_ulp"]),
                    number(error["max_of_bound"]),
                ]
                wrong.append(f"{of_no_distance + error['wrong_zero_sign']:,}")
            title = name if contender == contenders[0] else ""
            rows.append([title, CONTENDERS[contender], *cells, " / ".join(wrong)])
    bf16, fp16 = TYPES.values()
    headings = ["x", "computed by", f"{bf16}: correctly rounded", "ulp", "/ bound"]
    headings += [f"{fp16}: correctly rounded", "ulp", "/ bound", "wrong NaN, infinity, zero"]
    shape = "x".join(map(str, figures["shape"]))
    counted = figures["seeds"] * math.prod(figures["shape"])
    return (
        f"{table(headings, rows)}\n\n"
        f"Elements of each type and x: {counted:,}, of {shape}, {figures['groups']} groups,"
        f" eps {figures['eps']:g}, seeds: {figures['seeds']}."
    )


def hard(figures: dict[str, Any]) -> str:
    """Where FP32 fails: with a gradient and for FP32 x, beside what is got without."""

    def worst(error: dict[str, Any]) -> str:
        if error["got"] == error["wanted"]:
            return "right"
        return f"{error['got']:.7g}, not {error['wanted']:.7g}"

    names = [row["input"] for row in figures["hard"]]
    rows = []
    for row in sorted(figures["hard"], key=lambda row: names.index(row["input"])):
        shares = [
            percent(row[way]["correct"], row[way]["elements"])
            for way in ("no_gradient", "differentiable")
        ]
        worst_of_each = worst(row["differentiable"]), worst(row["fp32_x"])
        rows.append([row["input"], TYPES[row["dtype"]], *shares, *worst_of_each])
    headings = ["x", "type", "no gradient: correctly rounded", "gradient: correctly rounded"]
    return table([*headings, "its worst y", "the same x in FP32: its worst y"], rows)


# -------------------------------------------------------------------------------- docs/design.md


def roofline(figures: dict[str, Any]) -> str:
    """What each route issues and moves, and of both how much of what the GPU can in that time."""
    elements = math.prod(figures["shape"])
    copy = figures["counts"]["copy_kernel"]
    rows = []
    for name, count in figures["counts"].items():
        issued = count["instructions"] / (count["seconds"] * figures["issue_per_second"])
        moved = count["bytes"] / count["seconds"] / (copy["bytes"] / copy["seconds"])
        rows.append(
            [
                "a copy" if name == "copy_kernel" else f"`{name}`",
                f"{32 * count['instructions'] / elements:.1f}",
                f"{count['bytes'] / elements:.2f}",
                f"{1e6 * count['seconds']:.0f} us",
                f"{100 * issued:.0f} %",
                f"{100 * moved:.0f} %",
            ]
        )
    headings = ["", "instructions an element", "bytes an element", "time"]
    shape = "x".join(map(str, figures["shape"]))
    return (
        table([*headings, "of all instructions", "of a copy's bytes a second"], rows)
        + f"\n\nAt {shape}, BF16."
    )


def draw_roofline(figures: dict[str, Any]) -> None:
    from roofline import save_roofline

    save_roofline(figures, ROOT / "docs" / "roofline.png")


def draw_histograms(figures: dict[str, Any]) -> None:
    import tests_folder  # noqa: F401
    from pictures import save_histograms

    save_histograms(figures, ROOT / "docs" / "exactness.png")


def draw_speed(figures: dict[str, Any]) -> None:
    from speed_pictures import save_bandwidth, save_ratios

    save_ratios(figures, ROOT / "docs" / "speed.png")
    save_bandwidth(figures, ROOT / "docs" / "bandwidth.png")


# ------------------------------------------------------------------------------------ documents


@dataclass(frozen=True)
class Document:
    path: Path
    script: str  # that measured
    blocks: dict[str, Callable[[dict[str, Any]], str]]  # what stands between the markers
    also: Callable[[dict[str, Any]], None] | None = None

    def caption(self, figures: dict[str, Any], source: str) -> str:
        made = figures["environment"]
        cuda = f"driver {made['driver']}, CUDA {made['cuda']}, " if made["driver"] else ""
        up = "../" * (len(self.path.relative_to(ROOT).parts) - 1)
        return (
            f"{made['device']}, {cuda}torch {made['torch']}, {made['date']}, by"
            f" `benchmarks/{self.script}`: [{source}]({up}benchmarks/results/{source})"
        )

    def block(self, name: str, figures: dict[str, Any], source: str) -> str:
        """Marker, table and what was measured where by what."""
        content = self.blocks[name](figures)
        return f"<!-- {name} -->\n{content}\n\n{self.caption(figures, source)}\n"

    def filled(self, text: str, figures: dict[str, Any], source: str) -> str:
        for name in self.blocks:
            block = self.block(name, figures, source)
            text, count = re.subn(
                rf"<!-- {name} -->.*?(?=<!-- end -->)", lambda _, b=block: b, text, flags=re.S
            )
            if count != 1:
                sys.exit(f"{self.path.name} has no block <!-- {name} --> ... <!-- end -->")
        return text


README = ROOT / "README.md"
SPEED = Document(README, "speed.py", {"speed": speed}, draw_speed)
IN_SHORT = Document(README, "exactness.py", {"exactness": in_short})
EXACTNESS = Document(
    ROOT / "docs" / "exactness.md",
    "exactness.py",
    {"short": in_short, "inputs": by_input, "hard": hard},
    draw_histograms,
)
ROOFLINE = Document(
    ROOT / "docs" / "design.md", "roofline.py", {"roofline": roofline}, draw_roofline
)
DOCUMENTS = (SPEED, IN_SHORT, EXACTNESS, ROOFLINE)


def documents_of(figures: dict[str, Any]) -> list[Document]:
    script = f"{figures.get('kind', 'exactness')}.py"
    return [document for document in DOCUMENTS if document.script == script]


def read(source: str) -> dict[str, Any]:
    return json.loads((RESULTS / source).read_text("utf-8"))


def is_current(path: Path, name: str, block: str) -> bool:
    """Whether the block holds what the one file of figures that it names gives."""
    sources = set(re.findall(r"benchmarks/results/(\w+\.json)\)", block))
    if len(sources) != 1 or not (RESULTS / min(sources)).exists():
        return False
    figures, source = read(min(sources)), min(sources)
    return any(
        document.path == path
        and name in document.blocks
        and document.block(name, figures, source) == block
        for document in documents_of(figures)
    )


def stale() -> list[str]:
    """The tables that are not those of the figures that they name."""
    found = []
    for document in DOCUMENTS:
        text = document.path.read_text("utf-8")
        for name in document.blocks:
            blocks = re.findall(rf"(<!-- {name} -->.*?)<!-- end -->", text, flags=re.S)
            if len(blocks) != 1 or not is_current(document.path, name, blocks[0]):
                found.append(f"{name} in {document.path.name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tables of README and docs.")
    parser.add_argument("figures", type=Path, nargs="?", help="a JSON file in benchmarks/results")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if out of date")
    arguments = parser.parse_args()
    if arguments.check:
        out_of_date = stale()
        sys.exit("tables out of date: " + "; ".join(out_of_date) if out_of_date else 0)
    if arguments.figures is None or arguments.figures.resolve().parent != RESULTS:
        parser.error(f"figures must be a file in {RESULTS}, which the tables name as their source")
    figures = read(arguments.figures.name)
    if not figures.get("complete", True):
        parser.error(f"{arguments.figures.name} is of a run that was cut short")
    for document in documents_of(figures):
        text = document.path.read_text("utf-8")
        document.path.write_text(document.filled(text, figures, arguments.figures.name), "utf-8")
        if document.also:
            document.also(figures)


if __name__ == "__main__":
    main()
