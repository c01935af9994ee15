"""The demo's two pictures: the error of each site, and the time by shape."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")  # a picture file, no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sites import SiteResult

# Told apart by colour-blind eyes and in grey.
GNSILU = {"color": "#0072B2", "label": "gnsilu"}
PYTORCH = {"color": "#E69F00", "label": "PyTorch, FP32 inside"}


def _by_dtype(results: list[SiteResult]) -> dict[str, list[SiteResult]]:
    return {dtype: list(group) for dtype, group in groupby(results, key=lambda r: r.dtype)}


def _save(figure: Figure, title: str, caption: str, path: Path) -> None:
    figure.suptitle(title, fontsize=14)
    figure.text(0.5, 0.01, caption, ha="center", fontsize=9, color="#444444")
    figure.tight_layout(rect=(0, 0.035, 1, 0.98))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _stage(site: SiteResult) -> str:
    """encoder.down_blocks.0.resnets.1.norm2 is of the stage "encoder down 0"."""
    stage = site.name.split(".resnets")[0]
    return (
        stage.replace("_blocks", "")
        .replace("_block", "")
        .replace("conv_norm_", "")
        .replace(".", " ")
    )


def _mark_stages(axes: Axes, sites: list[SiteResult]) -> None:
    """Ticks where a block of the model begins."""
    stages = [_stage(site) for site in sites]
    starts = [i for i, stage in enumerate(stages) if i == 0 or stage != stages[i - 1]]
    axes.set_xticks(starts, [stages[i] for i in starts], rotation=70, fontsize=9)


def save_errors(results: list[SiteResult], caption: str, path: Path) -> None:
    """Above the largest error of each site as a share of the allowed one, below the misrounded."""
    by_dtype = _by_dtype(results)
    figure, axes = plt.subplots(
        2, len(by_dtype), figsize=(7 * len(by_dtype), 8), sharex=True, sharey="row", squeeze=False
    )
    for column, (dtype, sites) in enumerate(by_dtype.items()):
        largest, misrounded = axes[0][column], axes[1][column]
        places = range(len(sites))
        for style, marks, errors in (
            (PYTORCH, {"marker": "s", "markersize": 9}, [s.error_pytorch for s in sites]),
            (GNSILU, {"marker": "o", "markersize": 5}, [s.error for s in sites]),
        ):
            marks = {"linestyle": "none", **marks, **style}
            largest.plot(places, [e.max_of_bound for e in errors], **marks)
            misrounded.plot(places, [1e6 * (1 - e.share_correct) for e in errors], **marks)
        largest.axhline(1, color="#555555", linewidth=1, linestyle="--", label="allowed")
        largest.axhline(0.5, color="#999999", linewidth=1, label="perfect rounding")
        largest.set_title(dtype)
        _mark_stages(misrounded, sites)
        for panel in (largest, misrounded):
            panel.grid(alpha=0.3)
        largest.legend(fontsize=9)
    worst = max(max(r.error.max_of_bound, r.error_pytorch.max_of_bound) for r in results)
    if worst > 3:
        axes[0][0].set_yscale("log")
    else:
        axes[0][0].set_ylim(0, max(1.4, 1.1 * worst))
    axes[1][0].set_yscale("symlog", linthresh=1)
    most = max(1 - min(r.error.share_correct, r.error_pytorch.share_correct) for r in results)
    axes[1][0].set_ylim(-0.2, max(10, 2e6 * most))
    axes[0][0].set_ylabel(
        "largest error as a share of the allowed:\n1 unit in the last place, or where\n"
        r"$w\hat{x} + b$ cancels $2^{-20}\,(|w\hat{x}| + |b|)$",
        fontsize=9,
    )
    axes[1][0].set_ylabel("misrounded elements per million")
    _save(figure, "Error against FP64 at every GroupNorm + SiLU of the autoencoder", caption, path)


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
                f"{slow / fast:.2g}x", (place, max(slow, fast)), (0, 3), fontsize=9,
                textcoords="offset points", ha="center",
            )  # fmt: skip
        names = [
            f"{'x'.join(map(str, shape))} ({len(group)} site{'s' * (len(group) > 1)})"
            for shape, group in zip(shapes, of_shape, strict=True)
        ]
        panel.set_xticks(places, names, rotation=40, ha="right", fontsize=8)
        panel.set_yscale("log")
        panel.margins(y=0.12)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.set_title(dtype)
        panel.legend(fontsize=9, loc="upper left")
    axes[0][0].set_ylabel("time of a call, microseconds (median)")
    _save(figure, "Time of GroupNorm + SiLU by shape of the activation", caption, path)
