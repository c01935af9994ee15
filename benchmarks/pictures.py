"""The demo's pictures, the error of each site and the time by shape, and exactness.py's."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a picture file, no window
import matplotlib.pyplot as plt
from gnsilu.timing import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from sites import SiteResult, short_name

# Told apart by colour-blind eyes and in grey.
GNSILU = {"color": "#0072B2", "label": "gnsilu"}
PYTORCH = {"color": "#E69F00", "label": "PyTorch, FP32 inside"}


def _by_dtype(results: list[SiteResult]) -> dict[str, list[SiteResult]]:
    return {dtype: list(group) for dtype, group in groupby(results, key=lambda r: r.dtype)}


def save_figure(figure: Figure, title: str, caption: str, path: Path) -> None:
    figure.suptitle(title, fontsize=14)
    figure.text(0.5, 0.01, caption, ha="center", fontsize=9, color="#444444")
    figure.tight_layout(rect=(0, 0.035 if "\n" not in caption else 0.06, 1, 0.98))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def scale_by_logarithm(axes: Axes) -> None:
    """The y axis by its logarithm, with plain numbers at 1, 2, 5, 10, ..."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_stages(axes: Axes, sites: list[SiteResult]) -> None:
    """Names under the middle of each block of the model, lines between blocks."""
    stages = [short_name(site.name.split(".resnets")[0]) for site in sites]
    places = {
        stage: [i for i, other in enumerate(stages) if other == stage]
        for stage in dict.fromkeys(stages)
    }
    axes.set_xticks([sum(p) / len(p) for p in places.values()], list(places), rotation=90)
    axes.set_xticks([p[0] - 0.5 for p in places.values()][1:], minor=True)
    axes.tick_params(axis="x", which="major", length=0, labelsize=9)


def _plot_shares(axes: Axes, shares: list[float], **marks: Any) -> None:
    """Finite shares at their height; the others, which have none, as crosses along the top."""
    finite = [share if math.isfinite(share) else math.nan for share in shares]
    axes.plot(range(len(shares)), finite, **marks)
    others = [place for place, share in enumerate(shares) if not math.isfinite(share)]
    if others:
        marks |= {"marker": "X", "markersize": marks["markersize"] + 3}
        marks["label"] += ": not finite"
        axes.plot(
            others, [0.97] * len(others), transform=axes.get_xaxis_transform(), zorder=3, **marks
        )


def _scale_shares(axes: Axes, shares: list[float]) -> None:
    """From 0, and only a range past 10 by its logarithm."""
    worst = max((share for share in shares if math.isfinite(share)), default=0.0)
    if worst > 10:
        scale_by_logarithm(axes)
        axes.set_ylim(0.05, 3 * worst)
    else:
        axes.set_ylim(0, max(1.4, 1.2 * worst))


def save_errors(results: list[SiteResult], caption: str, path: Path) -> None:
    """Above the largest error of each site as a share of the allowed one, below the misrounded."""
    by_dtype = _by_dtype(results)
    figure, axes = plt.subplots(
        2, len(by_dtype), figsize=(7 * len(by_dtype), 8), sharex=True, sharey="row", squeeze=False
    )
    for column, (dtype, sites) in enumerate(by_dtype.items()):
        largest, misrounded = axes[0][column], axes[1][column]
        for style, marks, errors in (
            (PYTORCH, {"marker": "s", "markersize": 9}, [s.error_pytorch for s in sites]),
            (GNSILU, {"marker": "o", "markersize": 5}, [s.error for s in sites]),
        ):
            marks = {"linestyle": "none", **marks, **style}
            _plot_shares(largest, [e.max_of_bound for e in errors], **marks)
            misrounded.plot([e.misrounded_per_million for e in errors], **marks)
        largest.axhline(1, color="#555555", linewidth=1, linestyle="--", label="allowed")
        largest.axhline(0.5, color="#999999", linewidth=1, label="perfect rounding")
        largest.set_title(dtype)
        _mark_stages(misrounded, sites)
        for panel in (largest, misrounded):
            panel.grid(axis="y", alpha=0.3)
            panel.grid(axis="x", which="minor", alpha=0.3)
        largest.legend(fontsize=9, loc="lower left", ncols=2)
    errors = [error for r in results for error in (r.error, r.error_pytorch)]
    _scale_shares(axes[0][0], [e.max_of_bound for e in errors])
    axes[1][0].set_yscale("symlog", linthresh=1)
    axes[1][0].set_ylim(-0.2, max(10, 2 * max(e.misrounded_per_million for e in errors)))
    axes[1][0].yaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel(
        "largest error as a share of the allowed:\n1 unit in the last place, or where\n"
        r"$w\hat{x} + b$ cancels $2^{-20}\,(|w\hat{x}| + |b|)$",
        fontsize=9,
    )
    axes[1][0].set_ylabel("misrounded elements per million")
    save_figure(
        figure, "Error against FP64 at every GroupNorm + SiLU of the autoencoder", caption, path
    )


def save_speed(results: list[SiteResult], caption: str, path: Path) -> None:
    """The median time of the sites of each shape, smallest shape first."""
    by_dtype = _by_dtype(results)
    figure, axes = plt.subplots(
        1, len(by_dtype), figsize=(7 * len(by_dtype), 6), sharey=True, squeeze=False
    )
    for panel, (dtype, sites) in zip(axes[0], by_dtype.items(), strict=True):
        ordered = sorted(sites, key=lambda s: (s.megabytes_moved, s.shape))
        shapes = list(dict.fromkeys(site.shape for site in ordered))
        of_shape = [[s for s in sites if s.shape == shape] for shape in shapes]
        pytorch = [median(s.time_pytorch.median for s in group) for group in of_shape]
        gnsilu = [median(s.time.median for s in group) for group in of_shape]
        places = range(len(shapes))
        panel.bar([p - 0.2 for p in places], pytorch, 0.4, **PYTORCH)
        panel.bar([p + 0.2 for p in places], gnsilu, 0.4, **GNSILU)
        for place, slow, fast in zip(places, pytorch, gnsilu, strict=True):
            panel.annotate(
                f"{slow / fast:.2f}x", (place, max(slow, fast)), (0, 3), fontsize=9,
                textcoords="offset points", ha="center",
            )  # fmt: skip
        names = [
            f"{'x'.join(map(str, shape))} ({len(group)} site{'s' * (len(group) > 1)})"
            for shape, group in zip(shapes, of_shape, strict=True)
        ]
        panel.set_xticks(places, names, rotation=40, ha="right", fontsize=8)
        scale_by_logarithm(panel)
        panel.margins(y=0.12)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.set_title(dtype)
        panel.legend(fontsize=9, loc="upper left")
    axes[0][0].set_ylabel("time of a call, microseconds (median)")
    save_figure(figure, "Time of GroupNorm + SiLU by shape of the activation", caption, path)


# How each of the histogram's contenders is drawn, the topmost last.
HISTOGRAM_STYLES: dict[str, dict[str, Any]] = {
    "eager_16_bit": {"color": "#444444", "linestyle": "--", "label": "PyTorch, 16-bit"},
    "autocast": {**PYTORCH, "linewidth": 2.5},
    "fallback": {**GNSILU, "linewidth": 1.2, "label": "gnsilu (fallback)"},
    "three_pass": {**GNSILU, "linewidth": 1.2, "label": "gnsilu (three_pass)"},
    "two_pass": {**GNSILU, "linewidth": 1.2, "label": "gnsilu (two_pass)"},
}


def save_histograms(figures: dict[str, Any], path: Path) -> None:
    """The counts of the signed errors that exactness.py found, a panel for each input and type."""
    rows = figures["histograms"]
    inputs, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("input", "dtype"))
    contenders = [name for name in HISTOGRAM_STYLES if name in rows[0]["counts"]]
    # One of our own, the fastest.
    contenders = [
        name for name in contenders if HISTOGRAM_STYLES[name].get("color") != GNSILU["color"]
    ] + contenders[-1:]
    units, width = figures["units"], 1 / figures["bins_a_unit"]
    edges = [-units + width * i for i in range(round(2 * units / width) + 1)]
    figure, grid = plt.subplots(
        len(dtypes), len(inputs), figsize=(14, 4.2 * len(dtypes)),
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for row in rows:
        panel = grid[dtypes.index(row["dtype"])][inputs.index(row["input"])]
        panel.axvspan(-0.5, 0.5, color="#000000", alpha=0.1, label="correctly rounded", zorder=0)
        for name in contenders:
            panel.stairs(row["counts"][name], edges, **HISTOGRAM_STYLES[name])
        ours = contenders[-1]
        panel.stairs(row["counts"][ours], edges, fill=True, color=GNSILU["color"], alpha=0.25)
        panel.set_yscale("log")
        panel.set_title(f"x {row['input']}, {row['dtype']}")
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    panel.set_ylim(bottom=0.5)
    panel.set_xlim(-units, units)
    panel.set_xticks(range(-units, units + 1))
    for panel in grid[-1]:
        panel.set_xlabel(
            "error in units in the last place (the bins at the ends hold all that is beyond)"
        )
    for panel in grid[:, 0]:
        panel.set_ylabel(f"elements in each 1/{figures['bins_a_unit']} of a unit")
    handles, labels = grid[0][0].get_legend_handles_labels()
    grid[0][0].legend(handles[::-1], labels[::-1], fontsize=9, loc="upper left")
    made = str(Environment(**figures["environment"]))
    save_figure(figure, "Error of silu(group_norm(x)) against the unrounded FP64 value", made, path)
