"""How fast gnsilu is on a GPU: beside a copy of the same bytes, PyTorch and torch.compile.

Prints a line a shape and what the targets make of it, writes speed_<gpu>.json after each shape, and
where matplotlib is installed two pictures. Two to three minutes on an H200. Exits 0 whatever the
figures are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gnsilu
import torch
from contenders import (
    FP16_SHAPES,
    MORE_SHAPES,
    ROUTES,
    SHAPES,
    Case,
    Shape,
    bytes_of,
    compile_afresh,
    default,
    group_bytes_of,
    name_of,
    through,
    why_not_compiled,
    why_not_through,
)
from distributions import normal
from gnsilu.bench import EPS, GROUPS, autocast, eager_16_bit
from gnsilu.timing import COPIES, Timing, Variant, device_times, environment, host_times
from rich.console import Console
from targets import HEADINGS, MIB, Row, Verdict, host_of_clone, is_small, judge, ratio, ruler

SMALL_BYTES = 64 * MIB  # --shapes small: those below


@dataclass(frozen=True)
class Effort:
    """Seconds of replays for all contenders at a shape, and what is measured at all."""

    cold_s: float
    warm_s: float
    host_rounds: int
    fallback: bool
    fp16: bool


FULL = Effort(cold_s=1.2, warm_s=0.6, host_rounds=15, fallback=True, fp16=True)
QUICK = Effort(cold_s=0.4, warm_s=0.2, host_rounds=7, fallback=False, fp16=False)


def work(shapes: str, effort: Effort) -> list[tuple[Shape, torch.dtype]]:
    """In the order of measuring: what is judged first, a cut run loses the rest."""
    found = [(shape, torch.bfloat16) for shape in SHAPES + MORE_SHAPES]
    found += [(shape, torch.float16) for shape in FP16_SHAPES if effort.fp16]
    return [item for item in found if shapes == "all" or bytes_of(item[0]) < SMALL_BYTES]


# ---------------------------------------------------------------------------------- measuring


def variants_of(case: Case, effort: Effort) -> tuple[dict[str, Variant], dict[str, str]]:
    """The contenders by name, in the order of a round, and why others cannot run."""
    missing: dict[str, str] = {}
    variants = {**COPIES, "gnsilu": case.bound(default)}
    for name in ROUTES:
        if name == "fallback" and not effort.fallback:
            continue
        reason = why_not_through(name, case.x, case.weight, case.bias)
        if reason is None:
            variants[name] = case.bound(through(name))
        else:
            missing[name] = reason
    variants["copy_again"] = torch.clone
    compiled = compile_afresh()
    reason = why_not_compiled(compiled, case.x)
    if reason is None:
        variants["compiled"] = case.bound(compiled)
    else:
        missing["compiled"] = reason
    variants["autocast"] = case.bound(autocast)
    # A 16-bit model has its parameters in 16 bits.
    variants["eager_16_bit"] = case.bound(eager_16_bit, case.x.dtype)
    return variants, missing


def with_ratios(times: dict[str, Timing]) -> dict[str, Any]:
    """As JSON, each with median, p10 and p90 of its time over the copy's median."""
    copy = min(times[name].median for name in COPIES)
    return {
        name: asdict(t) | {"of_copy": [round(v / copy, 4) for v in (t.median, t.p10, t.p90)]}
        for name, t in times.items()
    }


def time_on_host(case: Case, variants: dict[str, Variant], rounds: int) -> dict[str, Any]:
    weight, bias = case.weight, case.bias
    measured: dict[str, Variant] = {
        "clone": lambda x: x.clone(),
        # What a caller writes, without the functions that the other variants go through.
        "gnsilu": lambda x: gnsilu.group_norm_silu(x, GROUPS, weight, bias, EPS),
        "clone_again": lambda x: x.clone(),
    }
    others = ("compiled", "autocast", "eager_16_bit")
    measured |= {name: variants[name] for name in others if name in variants}
    times = host_times(measured, case.x, rounds=rounds)
    return {name: asdict(timing) for name, timing in times.items()}


def memory_beyond_result(variant: Variant, x: torch.Tensor) -> int:
    """What a warm call has allocated at its peak, less its result, in bytes that it asked for.

    Not in bytes that it got: the allocator hands out up to 1 MiB more than was asked for.
    """
    variant(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    y = variant(x)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return int(peak - before - y.nbytes)


def measure_shape(shape: Shape, dtype: torch.dtype, effort: Effort) -> Row:
    began = time.perf_counter()
    case = Case.of(normal(shape, dtype, "cuda"))
    variants, missing = variants_of(case, effort)
    row: Row = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": bytes_of(shape),
        "group_bytes": group_bytes_of(shape),
        "missing": missing,
        "cold": with_ratios(device_times(variants, case.x, effort.cold_s)),
        "warm": None,
        "host": None,
        "memory_bytes": memory_beyond_result(variants["gnsilu"], case.x),
    }
    if case.x.nbytes <= torch.cuda.get_device_properties(case.x.device).L2_cache_size:
        row["warm"] = with_ratios(device_times(variants, case.x, effort.warm_s, warm_l2=True))
    if is_small(row):
        row["host"] = time_on_host(case, variants, effort.host_rounds)
    # Asked last: by now a call has tuned itself.
    plan = gnsilu.explain(case.x, GROUPS, case.weight, case.bias, EPS)
    row["route"], row["config"] = plan.route, str(plan.config or "")
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


# ---------------------------------------------------------------------------------- reporting

# What stands in a line, and how wide; ratios are to the copy, cold unless said.
COLUMNS = {
    "shape": 17, "type": 10, "copy, us (p10-p90)": 24, "A/A": 7, "gnsilu (p10-p90)": 19,
    "route": 12, "ring": 6, "resident": 10, "two_pass": 10, "three_pass": 12, "fallback": 10,
    "compiled": 10, "autocast": 10, "16-bit": 8, "warm": 8, "host": 8, "KiB": 8, "s": 5,
}  # fmt: skip


def line_of(cells: list[str]) -> str:
    return "".join(f"{c:<{w}}" for c, w in zip(cells, COLUMNS.values(), strict=True)).rstrip()


def aa(row: Row) -> float:
    return ratio(row, "copy_again", "copy")


def cells_of(row: Row) -> list[str]:
    def times(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.2f}"

    copy = min((row["cold"][name] for name in COPIES), key=lambda timing: timing["median"])
    median, p10, p90 = row["cold"]["gnsilu"]["of_copy"]
    contenders = (*ROUTES, "compiled", "autocast", "eager_16_bit")
    return [
        name_of(row["shape"]), row["dtype"],
        f"{copy['median']:.2f} ({copy['p10']:.2f}-{copy['p90']:.2f})", f"{aa(row):.3f}",
        f"{median:.2f} ({p10:.2f}-{p90:.2f})", row["route"],
        *(times(ratio(row, name)) for name in contenders),
        times(ratio(row, "gnsilu", state="warm")), times(host_of_clone(row)),
        f"{row['memory_bytes'] / 1024:.1f}", f"{row['seconds']:.1f}",
    ]  # fmt: skip


def print_verdicts(verdicts: list[Verdict], console: Console) -> None:
    console.print("\nAgainst the targets: the worst of each class, cold L2", style="bold")
    rows = [list(HEADINGS), *(verdict.cells() for verdict in verdicts)]
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    styles = {"FAIL": "bold red", "not measured": "yellow", "goal": "green"}
    for cells in rows:
        line = "".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()
        console.print(line, style=styles.get(cells[-1]), highlight=False)


def save(figures: dict[str, Any], path: Path) -> None:
    """Whole or not at all: the run may be cut while it writes."""
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    new.replace(path)


def save_pictures(figures: dict[str, Any], folder: Path, console: Console) -> None:
    try:
        from speed_pictures import save_bandwidth, save_ratios
    except ImportError as error:
        console.print(f"no pictures: {error}", highlight=False)
        return
    for draw, name in ((save_ratios, "speed_ratio.png"), (save_bandwidth, "speed_bandwidth.png")):
        draw(figures, folder / name)
        console.print(f"saved {folder / name}", highlight=False)


# --------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder; by default this one")
    parser.add_argument(
        "--shapes", choices=["small", "all"], default="all", help="small: those below 64 MiB"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer replays, no FP16, not the fallback"
    )
    return parser.parse_args()


def measure_all(
    figures: dict[str, Any], todo: list[tuple[Shape, torch.dtype]], effort: Effort, path: Path,
    console: Console,
) -> None:  # fmt: skip
    """Fills figures, and saves them after each shape."""
    console.print(line_of(list(COLUMNS)), style="bold", highlight=False)
    with console.status("measuring") as status:
        for number, (shape, dtype) in enumerate(todo, 1):
            status.update(f"{number} of {len(todo)}: {name_of(shape)}, {dtype}")
            try:
                row = measure_shape(shape, dtype, effort)
            except torch.OutOfMemoryError:
                why = "out of memory"
                figures["left_out"].append({"shape": shape, "dtype": str(dtype), "why": why})
                console.print(f"{name_of(shape)}, {dtype}: {why}", style="yellow")
            else:
                figures["rows"].append(row)
                console.print(line_of(cells_of(row)), highlight=False)
            save(figures, path)
            torch.cuda.empty_cache()


def report(figures: dict[str, Any], console: Console) -> None:
    rows = figures["rows"]
    found = [aa(row) for row in rows]
    shares = [ruler(row) / row["cold"]["copy"]["median"] for row in rows]
    console.print(
        f"\nA/A, a copy against itself: {min(found):.3f} to {max(found):.3f}. The kernel's copy is"
        f" the faster one at {sum(share < 1 for share in shares)} of {len(rows)}.",
        highlight=False,
    )
    for row in rows:
        if "compiled" in row["missing"]:
            console.print(f"torch.compile is not possible here: {row['missing']['compiled']}")
            break
    print_verdicts(judge(rows), console)


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("speed.py measures a GPU and finds none.", file=sys.stderr)
        return 1
    os.environ.pop("GNSILU_ROUTE", None)  # "gnsilu" is what a call takes by itself
    # A pool of compiling processes would take longer to start than a few kernels take.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    console = Console(soft_wrap=True)
    torch.manual_seed(0)
    effort = QUICK if arguments.quick else FULL
    measured_on = environment(torch.device("cuda"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"speed_{measured_on.short_device}.json"
    figures: dict[str, Any] = {
        "kind": "speed", "complete": False, "environment": asdict(measured_on), "groups": GROUPS,
        "eps": EPS, "shapes": arguments.shapes, "effort": asdict(effort), "left_out": [],
        "rows": [],
    }  # fmt: skip
    console.print(f"{measured_on}; times the fastest copy's, cold L2 unless said", highlight=False)
    began = time.perf_counter()
    measure_all(figures, work(arguments.shapes, effort), effort, path, console)
    figures["complete"] = True
    figures["targets"] = [verdict.as_json() for verdict in judge(figures["rows"])]
    figures["seconds"] = round(time.perf_counter() - began, 1)
    save(figures, path)
    console.print(f"saved {path}", highlight=False)
    if figures["rows"]:
        save_pictures(figures, arguments.output, console)
        report(figures, console)
    console.print(f"{figures['seconds']} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
