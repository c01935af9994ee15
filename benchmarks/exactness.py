"""How exact gnsilu's routes and PyTorch's ways are, against FP64 rounded once.

Prints a line for each input, writes exactness_<gpu>.json, whose figures readme_tables.py puts into
docs/exactness.md, and where matplotlib is installed exactness.png. About a minute, on a GPU or not.
Exits 1 where gnsilu is outside what it promises.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import gnsilu
import tests_folder  # noqa: F401
import torch
from contenders import (
    Contender,
    compile_afresh,
    route,
    through,
    why_not_compiled,
)
from distributions import DISTRIBUTIONS, Distribution, affine
from gnsilu.bench import EPS, GROUPS, autocast, eager_16_bit
from gnsilu.timing import environment
from reference import (
    MIN_SHARE,
    Comparison,
    errors_of,
    errors_of_each,
    group_norm_silu_fp64,
    round_to,
    ulp_of,
)
from rich.console import Console
from torch import Tensor

CHANNELS = 128
DTYPES = (torch.bfloat16, torch.float16)
# The routes that are exact by promise.
EXACT = ("two_pass", "three_pass", "fallback")
HISTOGRAM_INPUTS = ("N(0,1)", "decoder-like")
# Bins of the signed error, in units in the last place: all beyond the last is in the last.
BINS_A_UNIT = 16
UNITS = 4


# --------------------------------------------------------------------------------- contenders


def differentiable(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.enable_grad(), route("auto"):
        x = x.detach().requires_grad_()
        return gnsilu.group_norm_silu(x, GROUPS, weight, bias, EPS).detach()


def contenders(shape: tuple[int, ...], device: torch.device, console: Console) -> dict[str, Any]:
    """The functions by their names; in place of one that cannot run here, why."""
    compiled = compile_afresh()  # once for each type of x
    found: dict[str, Contender | str] = {
        "two_pass": through("two_pass") if device.type == "cuda" else "needs a CUDA GPU",
        "three_pass": through("three_pass") if device.type == "cuda" else "needs a CUDA GPU",
        "fallback": through("fallback"),
        "differentiable": differentiable,
        "autocast": autocast,
        "eager_16_bit": eager_16_bit,
        "compiled": compiled,
    }
    for dtype in DTYPES:
        console.print(f"compiling for {dtype}", highlight=False)
        reason = why_not_compiled(compiled, torch.ones(shape, dtype=dtype, device=device))
        if reason is not None:
            console.print(f"torch.compile is not possible here: {reason}", highlight=False)
            found["compiled"] = reason
            break
    return found


# ---------------------------------------------------------------------------------- measuring


def signed_errors(y: Tensor, y64: Tensor) -> Tensor:
    """Counts of y - y64 in units in the last place, from -UNITS to UNITS.

    A bin has its edge further from 0, so that an error of exactly half a unit is within it.
    """
    error = (y.double() - y64) / ulp_of(y64, y.dtype)
    half = UNITS * BINS_A_UNIT
    step = (error.abs() * BINS_A_UNIT).ceil_().sub_(1).nan_to_num_(nan=half).clamp_(0, half - 1)
    place = torch.where(error < 0, half - 1 - step, half + step).long()
    return torch.bincount(place.flatten(), minlength=2 * half)


def measure(
    distribution: Distribution,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    seeds: int,
    implementations: dict[str, Contender],
    histogram: bool,
) -> tuple[dict[str, Comparison], dict[str, list[int]]]:
    """The error of every contender over all seeds, and the counts of its signed errors."""
    errors: dict[str, Comparison] = {}
    counts: dict[str, Any] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        x = distribution.draw(shape, dtype, device)
        arguments = affine(distribution, shape[1], dtype, device)
        results = {name: f(x, *arguments) for name, f in implementations.items()}
        found = errors_of_each(results, x, GROUPS, *arguments, EPS)
        errors = {name: e.merged(errors[name]) if errors else e for name, e in found.items()}
        if histogram:
            y64 = group_norm_silu_fp64(x, GROUPS, *arguments, EPS)
            for name, y in results.items():
                counts[name] = counts.get(name, 0) + signed_errors(y, y64)
    return errors, {name: count.tolist() for name, count in counts.items()}


def keeps_promises(error: Comparison, dtype: torch.dtype, ordinary: bool) -> bool:
    # A few may fall to the other side of a tie, however few there are.
    allowed = max(4.0, (1 - MIN_SHARE[dtype]) * error.elements)
    return error.within_bound and (not ordinary or error.elements - error.correct <= allowed)


def as_json(error: Comparison) -> dict[str, Any]:
    return asdict(error) | {"share_correct": error.share_correct}


def line_of(name: str, dtype: str, errors: dict[str, Comparison]) -> str:
    cells = [f"{n} {100 * e.share_correct:.4f} / {e.max_of_bound:.2f}" for n, e in errors.items()]
    return f"{name}, {dtype}: " + ", ".join(cells)


# ------------------------------------------------------------- where FP32 itself is not enough


def constant_groups(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.tensor([0.1, 255.5, 65504.0], device=device).repeat(shape[1])[:GROUPS]
    of_channels = values.repeat_interleave(shape[1] // GROUPS).view(1, -1, 1, 1)
    return of_channels.expand(shape).to(dtype).contiguous()


def hard_cases(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, x, weight and bias of inputs at which a group norm or a SiLU in FP32 fails."""
    torch.manual_seed(0)

    def of(name: str) -> tuple[Tensor, Tensor, Tensor]:
        distribution = DISTRIBUTIONS[name]
        return distribution.draw(shape, dtype, device), *affine(
            distribution, shape[1], dtype, device
        )

    _, weight, bias = of("N(0,1)")
    if dtype == torch.bfloat16:
        yield "variance past FP32: uniform ±1e30", *of("huge")
    yield "cancellation: N(1000,1)", *of("N(1000,1)")
    yield "cancellation: two-valued, 1000 or 1008", *of("two-valued")
    constant = constant_groups(shape, dtype, device)
    yield "constant groups: 0.1, 255.5 or 65504", constant, weight, bias
    if dtype == torch.bfloat16:  # of FP16 the results are -0
        x, weight, _ = of("N(0,1)")
        z = torch.linspace(-105, -88, shape[1], device=device)
        yield "SiLU's tail: z from -105 to -88", x, torch.zeros_like(weight), z


def with_worst(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Any]:
    """The error, and the element of the largest: what it is and what it should be."""
    error = errors_of(y, x, GROUPS, weight, bias, EPS)
    y64 = group_norm_silu_fp64(x, GROUPS, weight, bias, EPS)
    at = error.worst_index
    worst = {"wanted": round_to(y64[at], y.dtype).item(), "got": y[at].item()}
    return as_json(error) | worst | {"good": error.within_bound}


def measure_hard(shape: tuple[int, ...], device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for dtype in DTYPES:
        for name, x, weight, bias in hard_cases(shape, dtype, device):
            wide = x.float()
            results = {
                "no_gradient": (gnsilu.group_norm_silu(x, GROUPS, weight, bias, EPS), x),
                "differentiable": (differentiable(x, weight, bias), x),
                "fp32_x": (gnsilu.group_norm_silu(wide, GROUPS, weight, bias, EPS), wide),
            }
            found = {key: with_worst(y, of, weight, bias) for key, (y, of) in results.items()}
            rows.append({"input": name, "dtype": str(dtype).removeprefix("torch.")} | found)
    return rows


# --------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder; by default this one")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    parser.add_argument("--size", type=int, help="of 1x128xSIZExSIZE; default 512, on a CPU 64")
    parser.add_argument("--seeds", type=int, help="default 4, on a CPU 1")
    return parser.parse_args()


def measure_inputs(
    shape: tuple[int, ...],
    device: torch.device,
    seeds: int,
    implementations: dict[str, Contender],
    console: Console,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row of errors for each input and type of x, and some rows of counts of signed errors."""
    rows, histograms = [], []
    for dtype, (name, distribution) in product(DTYPES, DISTRIBUTIONS.items()):
        errors, counts = measure(
            distribution, dtype, shape, device, seeds, implementations,
            histogram=name in HISTOGRAM_INPUTS,
        )  # fmt: skip
        ours = [error for contender, error in errors.items() if contender in EXACT]
        good = all(keeps_promises(error, dtype, distribution.ordinary) for error in ours)
        row = {"input": name, "dtype": str(dtype).removeprefix("torch.")}
        line = line_of(name, row["dtype"], errors)
        console.print(line, highlight=False, style=None if good else "bold red")
        judged = {"ordinary": distribution.ordinary, "good": good}
        rows.append(row | judged | {n: as_json(error) for n, error in errors.items()})
        if counts:
            histograms.append(row | {"counts": counts})
    return rows, histograms


def measure_all(
    shape: tuple[int, ...], device: torch.device, seeds: int, console: Console
) -> tuple[dict[str, Any], bool]:
    found = contenders(shape, device, console)
    implementations = {name: f for name, f in found.items() if callable(f)}
    figures: dict[str, Any] = {
        "shape": shape, "groups": GROUPS, "eps": EPS, "seeds": seeds,
        "missing": {name: why for name, why in found.items() if not callable(why)},
        "bins_a_unit": BINS_A_UNIT, "units": UNITS,
    }  # fmt: skip
    with console.status("measuring"):
        figures["exactness"], figures["histograms"] = measure_inputs(
            shape, device, seeds, implementations, console
        )
        small = (1, CHANNELS, *(min(n, 64) for n in shape[2:]))
        figures["hard"] = measure_hard(small, device)
    good = all(row["good"] for row in figures["exactness"])
    return figures, good and all(row["no_gradient"]["good"] for row in figures["hard"])


def save(figures: dict[str, Any], path: Path, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"saved {path}", highlight=False)
    try:
        from pictures import save_histograms
    except ImportError as error:
        console.print(f"no picture: {error}", highlight=False)
        return
    picture = path.with_name("exactness.png")
    save_histograms(figures, picture)
    console.print(f"saved {picture}", highlight=False)


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    # A pool of compiling processes would take longer to start than the two kernels take.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    size = arguments.size or (512 if on_gpu else 64)
    seeds = arguments.seeds or (4 if on_gpu else 1)
    console = Console(soft_wrap=True)
    measured_on = environment(device)
    console.print(f"{measured_on}; share correctly rounded, % / worst of what is allowed")
    began = time.perf_counter()
    figures, good = measure_all((1, CHANNELS, size, size), device, seeds, console)
    figures = {"environment": asdict(measured_on), **figures}
    figures["seconds"] = round(time.perf_counter() - began, 1)
    save(figures, arguments.output / f"exactness_{measured_on.short_device}.json", console)
    verdict = "all promises kept" if good else "PROMISES BROKEN, see above"
    console.print(f"{verdict}; {figures['seconds']} s", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
