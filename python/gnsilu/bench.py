"""How fast gnsilu is on this machine, beside a copy of the same bytes and PyTorch's ways."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gnsilu.functional import group_norm_silu
from gnsilu.introspection import explain
from gnsilu.timing import COPIES, Timing, Variant, cpu_times, device_times

GROUPS = 32
EPS = 1e-6
# Activations that image decoders and UNets normalise: (N, C, H, W).
SHAPES = (
    (2, 1280, 8, 8),
    (2, 640, 32, 32),
    (1, 512, 64, 64),
    (1, 512, 128, 128),
    (1, 512, 256, 256),
    (1, 256, 512, 512),
    (1, 128, 1024, 1024),
)
CPU_SHAPES = SHAPES[:4]  # the others take seconds there
TITLES = {
    "gnsilu": "gnsilu",
    "autocast": "PyTorch, FP32 inside (autocast)",
    "eager_16_bit": "PyTorch, 16-bit",
    "compiled": "torch.compile",
}


@dataclass(frozen=True)
class Row:
    """Times of one shape, cold L2."""

    shape: tuple[int, ...]
    route: str
    copy: Timing
    times: dict[str, Timing]
    """By the names of TITLES."""

    @property
    def megabytes(self) -> float:
        return 2e-6 * math.prod(self.shape)

    def of_copy(self, name: str) -> float:
        return self.times[name].median / self.copy.median

    @property
    def speedup(self) -> float:
        """Over PyTorch under autocast."""
        return self.times["autocast"].median / self.times["gnsilu"].median


def autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What PyTorch computes under CUDA autocast."""
    z = F.group_norm(x.float(), GROUPS, weight.float(), bias.float(), EPS)
    return F.silu(z).to(x.dtype)


def eager_16_bit(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, GROUPS, weight.to(x.dtype), bias.to(x.dtype), EPS))


def measured(device: torch.device, dtype: torch.dtype, compiled: bool) -> Iterator[Row | str]:
    """A row for each shape, or why there is none."""
    for shape in SHAPES if device.type == "cuda" else CPU_SHAPES:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield _measure(shape, device, dtype, compiled)
        except torch.OutOfMemoryError:
            yield f"{shape}: not enough free memory"
        except RuntimeError as error:  # GNSILU_ROUTE names one that cannot serve this shape
            yield f"{shape}: {str(error).splitlines()[0]}"


def _measure(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, compiled: bool
) -> Row:
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(shape, device=device, generator=generator).to(dtype)
    weight, bias = torch.randn(2, shape[1], device=device, generator=generator)

    def bound(way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Variant:
        return lambda x: way(x, weight, bias)

    variants: dict[str, Variant] = {
        **COPIES,
        "gnsilu": lambda x: group_norm_silu(x, GROUPS, weight, bias, EPS),
        "autocast": bound(autocast),
        "eager_16_bit": bound(eager_16_bit),
    }
    if compiled:
        torch.compiler.reset()  # for this one shape, as if it were the only one
        variants["compiled"] = bound(torch.compile(autocast, fullgraph=True, dynamic=False))
    timed = device_times if device.type == "cuda" else cpu_times
    times = timed(variants, x)
    copy = min((times.pop(name) for name in COPIES), key=lambda timing: timing.median)
    return Row(shape, explain(x, GROUPS, weight, bias, EPS).route, copy, times)


def why_no_picture(path: Path) -> str | None:
    """Why save_picture() cannot draw there; None where it can."""
    if path.suffix != ".png" or path.is_dir():
        return f"{path} is no name of a picture; FILE.png is wanted"
    if not path.parent.is_dir():
        return f"{path.parent} is no folder"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is missing: pip install matplotlib"
    return None


def save_picture(rows: list[Row], caption: str, path: Path) -> None:
    """Time over that of the copy by size of x. By matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ordered = sorted(rows, key=lambda row: row.megabytes)
    for name in ordered[0].times:
        sizes = [row.megabytes for row in ordered]
        ratios = [row.of_copy(name) for row in ordered]
        width = 2.5 if name == "gnsilu" else 1.2
        axes.plot(sizes, ratios, marker="o", linewidth=width, label=TITLES[name])
    axes.axhline(1, color="black", linewidth=1.2, label="fastest copy")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("size of x, MB")
    axes.set_ylabel("time, multiples of a copy of x")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle("silu(group_norm(x)): time as a multiple of a copy's")
    figure.text(0.5, 0.01, caption, ha="center", fontsize=8, parse_math=False)
    figure.savefig(path, dpi=120)
