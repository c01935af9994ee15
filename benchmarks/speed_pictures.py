"""speed.py's pictures: time as a multiple of the copy's, and bytes a second, by size of x."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gnsilu.timing import Environment
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from pictures import GNSILU, PYTORCH, plt, save_figure, scale_by_logarithm
from targets import Row, ratio, ruler

# From the back to the front. gnsilu's own routes are thin: gnsilu is one of them at each shape.
STYLES: dict[str, dict[str, Any]] = {
    "autocast": {**PYTORCH, "marker": "s", "label": "PyTorch, FP32 inside (autocast)"},
    "eager_16_bit": {"color": "#444444", "marker": "D", "label": "PyTorch, 16-bit"},
    "compiled": {"color": "#009E73", "marker": "^", "label": "torch.compile"},
    "fallback": {"color": "#999999", "marker": "x", "label": "gnsilu's fallback"},
    "three_pass": {"color": "#CC79A7", "marker": "3", "label": "gnsilu's three_pass"},
    "two_pass": {"color": "#56B4E9", "marker": "2", "label": "gnsilu's two_pass"},
    "resident": {"color": "#D55E00", "marker": "1", "label": "gnsilu's resident"},
    "ring": {"color": "#0072B2", "marker": "4", "label": "gnsilu's ring"},
    "gnsilu": {**GNSILU, "marker": "o", "linewidth": 2.5, "markersize": 7},
}
THIN = {"linewidth": 1, "markersize": 6}
OWN_ROUTES = ("fallback", "three_pass", "two_pass", "resident", "ring")
COPY = {"color": "#000000", "linewidth": 1.5, "label": "fastest copy"}
# x read once, y written once.
BYTES_AN_ELEMENT = 4


def megabytes(row: Row) -> float:
    return float(row["bytes"] / 1e6)


def terabytes_a_second(row: Row, microseconds: float) -> float:
    return BYTES_AN_ELEMENT * (row["bytes"] / 2) / microseconds / 1e6


def line(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """By size; where several shapes have one size, through the middle of their values."""
    by_size: dict[float, list[float]] = {}
    for size, value in sorted(points):
        by_size.setdefault(size, []).append(math.log(value))
    return list(by_size), [math.exp(sum(logs) / len(logs)) for logs in by_size.values()]


def plot(
    axes: Axes, points: dict[str, list[tuple[float, float]]], style: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """The line of a contender through its BF16 points; FP16's are hollow and without a line.

    Its end at the right and its style, for the legend.
    """
    marks = {key: style[key] for key in ("color", "marker") if key in style}
    marks["markersize"] = style.get("markersize", 0)
    sizes, values = line(points["bfloat16"])
    axes.plot(sizes, values, **{**style, "marker": ""})
    for dtype, face in (("bfloat16", marks["color"]), ("float16", "none")):
        if points.get(dtype) and "marker" in marks:
            axes.plot(
                *zip(*points[dtype], strict=True), linestyle="none", markerfacecolor=face, **marks
            )
    return values[-1], style


def points_of(rows: list[Row], value: Any) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {"bfloat16": []}
    for row in rows:
        found = value(row)
        if not math.isnan(found):
            points.setdefault(row["dtype"], []).append((megabytes(row), found))
    return points


def finish(
    axes: Axes,
    lines: list[tuple[float, dict[str, Any]]],
    figures: dict[str, Any],
    title: str,
    path: Path,
) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("activation x, MB (filled marks: BF16, hollow: FP16)")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    # In the order of the lines at the right, so that a line's name is found at a glance.
    ordered = sorted(lines, key=lambda entry: -entry[0])
    handles = [Line2D([], [], **style) for _, style in ordered]
    axes.legend(handles=handles, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(axes.figure, title, str(Environment(**figures["environment"])), path)


def contenders_in(rows: list[Row]) -> list[str]:
    """Those with a BF16 point, which a line goes through."""
    return [
        name for name in STYLES if any(name in r["cold"] and r["dtype"] == "bfloat16" for r in rows)
    ]


def style_of(name: str) -> dict[str, Any]:
    own = {**THIN, "linestyle": ":"} if name in OWN_ROUTES else {**THIN, "linestyle": "-"}
    return {**own, **STYLES[name]}


def save_ratios(figures: dict[str, Any], path: Path) -> None:
    """Device time over the fastest copy's, cold L2."""
    rows = figures["rows"]
    _, axes = plt.subplots(figsize=(11, 6.5))
    lines = [
        plot(axes, points_of(rows, lambda row, name=name: ratio(row, name)), style_of(name))
        for name in contenders_in(rows)
    ]
    lines.append(plot(axes, points_of(rows, lambda _: 1.0), COPY))
    scale_by_logarithm(axes)
    axes.set_ylabel("time as a multiple of the copy's, cold L2")
    finish(axes, lines, figures, "silu(group_norm(x)) beside a copy of x", path)


def save_bandwidth(figures: dict[str, Any], path: Path) -> None:
    """4 bytes an element over the time, whatever a contender moves in truth."""
    rows = figures["rows"]

    def of(name: str) -> Any:
        return lambda row: terabytes_a_second(row, ratio(row, name) * ruler(row))

    _, axes = plt.subplots(figsize=(11, 6.5))
    lines = [plot(axes, points_of(rows, of(name)), style_of(name)) for name in contenders_in(rows)]
    copy = points_of(rows, lambda row: terabytes_a_second(row, ruler(row)))
    lines.append(plot(axes, copy, COPY))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TB a second, of 4 bytes an element (x read, y written), cold L2")
    finish(axes, lines, figures, "Bytes a second of silu(group_norm(x)) and of a copy", path)
