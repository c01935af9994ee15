"""First figures on a GPU: exactness, equal bits over all configurations, memory and time.

Prints tables and writes them to a JSON file (first_figures.json). About two minutes.
Exits 1 where a result is outside the promised bound, differs in a bit, or takes over 1 MiB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gnsilu
import torch
from contenders import (
    EPS,
    GROUPS,
    LARGE,
    SHAPES,
    SMALLEST,
    Case,
    autocast,
    default,
    eager_16_bit,
    name_of,
)
from distributions import DISTRIBUTIONS, normal
from measure import COPIES, Timing, device_times, environment, host_times
from reference import MIN_SHARE, Comparison, errors_of_each  # measure makes it known
from rich.console import Console
from rich.table import Table
from torch import Tensor

CONFIG_SHAPES = [LARGE, (1, 128, 1024, 1024), (1, 512, 128, 128)]
BIT_SHAPES = [(2, 1280, 8, 8), (2, 320, 64, 64), (3, 96, 31, 33), (1, 128, 512, 512)]
MAX_WORKSPACE_BYTES = 1 << 20
REPEATS = 200


def two_pass(case: Case, config: Any, x: Tensor) -> Tensor:
    """With one of the tuner's candidates, whatever the tuner would take."""
    return torch.ops.gnsilu._with_config(
        x, GROUPS, case.weight, case.bias, EPS, x.dtype, True,
        "two_pass", config.threads, config.vectors_in_flight, 1,
    )  # fmt: skip


def candidates() -> list[Any]:
    return gnsilu._C.candidates(gnsilu._C.Route.two_pass)


# ---------------------------------------------------------------------------------- exactness


def exactness(console: Console) -> tuple[list[dict[str, Any]], bool]:
    table = Table(title="Error against FP64: gnsilu / PyTorch, FP32 inside")
    for heading in ("shape", "input", "type", "worst ulp", "of allowed", "correct, %"):
        table.add_column(heading)
    inputs = ("N(0,1)", "N(1000,1)", "two-valued", "decoder-like")
    rows, all_good = [], True
    for shape in [s for s in SHAPES if math.prod(s) <= 1 << 27]:
        for label in inputs:
            for dtype in (torch.bfloat16, torch.float16):
                case = Case.of(DISTRIBUTIONS[label].draw(shape, dtype, "cuda"))
                contenders = {"gnsilu": default, "pytorch": autocast}
                results = {name: case.bound(f)(case.x) for name, f in contenders.items()}
                errors = errors_of_each(results, case.x, GROUPS, case.weight, case.bias, EPS)
                ours, theirs = errors["gnsilu"], errors["pytorch"]
                good = ours.within_bound and ours.share_correct >= MIN_SHARE[dtype]
                all_good &= good
                type_name = str(dtype).removeprefix("torch.")
                table.add_row(
                    name_of(shape), label, type_name,
                    f"{ours.max_ulp:.3f} / {theirs.max_ulp:.3f}",
                    f"{ours.max_of_bound:.3f} / {theirs.max_of_bound:.3f}",
                    f"{100 * ours.share_correct:.5f} / {100 * theirs.share_correct:.5f}",
                    style=None if good else "bold red",
                )  # fmt: skip
                rows.append(
                    {"shape": shape, "input": label, "dtype": type_name, "good": good}
                    | {name: as_json(error) for name, error in errors.items()}
                )
    console.print(table)
    return rows, all_good


def as_json(error: Comparison) -> dict[str, Any]:
    return asdict(error) | {"share_correct": error.share_correct}


def equal_bits(console: Console) -> tuple[dict[str, Any], bool]:
    """Every candidate configuration, and 200 runs, against the first run's bits."""
    different: list[str] = []
    for shape in BIT_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            case = Case.of(normal(shape, dtype, "cuda", 3.0))
            ours = case.bound(default)
            first = ours(case.x).view(torch.int16)
            for config in candidates():
                y = two_pass(case, config, case.x)
                if not torch.equal(y.view(torch.int16), first):
                    different.append(f"{name_of(shape)} {dtype} {config}")
            for run in range(REPEATS):
                if not torch.equal(ours(case.x).view(torch.int16), first):
                    different.append(f"{name_of(shape)} {dtype} run {run}")
    counts = f"{len(candidates())} configurations and {REPEATS} runs of {len(BIT_SHAPES)} shapes"
    console.print(f"Equal bits, {counts} in 2 types: {len(different)} differ {different[:5]}")
    return {"of": counts, "different": different}, not different


def peak_memory(console: Console) -> tuple[dict[str, Any], bool]:
    """What a warm call at the large shape allocates beyond its output."""
    case = Case.of(normal(LARGE, torch.bfloat16, "cuda"))
    ours = case.bound(default)
    ours(case.x)  # tunes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ours(case.x)
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    plan = gnsilu.explain(case.x, GROUPS, case.weight, case.bias, EPS, case.x.dtype)
    console.print(f"Memory beyond the output at {name_of(LARGE)}: {extra} bytes; {plan}")
    return {"shape": LARGE, "bytes": extra}, extra <= MAX_WORKSPACE_BYTES


# --------------------------------------------------------------------------------------- time


def spread(timing: Timing) -> str:
    return f"{timing.median:.2f} ({timing.p10:.2f}-{timing.p90:.2f})"


def fastest_copy(times: dict[str, Timing]) -> Timing:
    return min((times[name] for name in COPIES), key=lambda timing: timing.median)


def device_time(console: Console) -> list[dict[str, Any]]:
    table = Table(title="Device time, BF16, cold L2: microseconds (p10-p90), ratio to the copy")
    for heading in ("shape", "copy", "A/A", "gnsilu", "x", "PyTorch FP32", "x", "16-bit", "x"):
        table.add_column(heading)
    rows = []
    for shape in SHAPES:
        case = Case.of(normal(shape, torch.bfloat16, "cuda"))
        times = device_times(
            {
                **COPIES,
                "gnsilu": case.bound(default),
                "copy_again": torch.clone,
                "pytorch_fp32": case.bound(autocast),
                "pytorch_16_bit": case.bound(eager_16_bit, torch.bfloat16),
            },
            case.x,
        )
        aa = times["copy_again"].median / times["copy"].median
        fastest = fastest_copy(times)
        copy = fastest.median
        cells = [name_of(shape), spread(fastest), f"{aa:.3f}"]
        for variant in ("gnsilu", "pytorch_fp32", "pytorch_16_bit"):
            cells += [spread(times[variant]), f"{times[variant].median / copy:.2f}"]
        table.add_row(*cells)
        rows.append({"shape": shape} | {name: asdict(t) for name, t in times.items()})
    console.print(table)
    return rows


def host_time(console: Console) -> dict[str, Any]:
    case = Case.of(normal(SMALLEST, torch.bfloat16, "cuda"))
    times = host_times(
        {
            "x.clone()": torch.clone,
            "gnsilu": case.bound(default),
            "x.clone() again": torch.clone,
            "PyTorch FP32": case.bound(autocast),
        },
        case.x,
    )
    parts = ", ".join(f"{name} {spread(t)}" for name, t in times.items())
    ratio = times["gnsilu"].median / times["x.clone()"].median
    console.print(f"Host time of a warm call at {name_of(SMALLEST)}, us: {parts}; x{ratio:.2f}")
    return {name: asdict(t) for name, t in times.items()}


def configurations(console: Console) -> list[dict[str, Any]]:
    rows = []
    for shape in CONFIG_SHAPES:
        case = Case.of(normal(shape, torch.bfloat16, "cuda"))
        variants = {str(c): partial(two_pass, case, c) for c in candidates()}
        times = device_times({**COPIES, **variants}, case.x, 2.0)
        copy = fastest_copy(times).median
        table = Table(title=f"two_pass at {name_of(shape)}, BF16: every candidate, default *")
        for heading in ("configuration", "us (p10-p90)", "x copy"):
            table.add_column(heading)
        default = next(iter(variants))
        for name, timing in sorted(
            ((name, times[name]) for name in variants), key=lambda item: item[1].median
        ):
            star = " *" if name == default else ""
            table.add_row(name + star, spread(timing), f"{timing.median / copy:.3f}")
            rows.append({"shape": shape, "config": name, "copy": copy} | asdict(timing))
        console.print(table)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("first_figures.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("first_figures.py measures a GPU and finds none.", file=sys.stderr)
        return 1
    console = Console(width=160)
    torch.manual_seed(0)
    measured_on = environment(torch.device("cuda"))
    console.print(str(measured_on))
    began = time.perf_counter()
    figures: dict[str, Any] = {"environment": asdict(measured_on)}
    good = True
    with torch.no_grad():
        for check in (exactness, equal_bits, peak_memory):
            figures[check.__name__], passed = check(console)
            good &= passed
        for timing in (device_time, host_time, configurations):
            figures[timing.__name__] = timing(console)
    figures["seconds"] = round(time.perf_counter() - began, 1)
    arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
    verdict = "all promises kept" if good else "PROMISES BROKEN, see above"
    console.print(f"{verdict}; {figures['seconds']} s; saved {arguments.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
