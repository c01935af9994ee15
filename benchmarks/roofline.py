"""Where each route lies under the roofs of bytes and of instructions.

    python benchmarks/roofline.py --output benchmarks/results

Has NVIDIA's ncu count, at one large shape, the warp instructions and the bytes of memory of each
route and of a copy, and their time. Writes roofline_<gpu>.json and roofline.png. The picture is
that of Ding and Williams (An instruction roofline model for GPUs, PMBS 2019): instructions a byte
against instructions a second.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import LARGE, ROUTES, Case, default, route, why_not_through
from gnsilu.timing import COPIES, Environment, environment

INSTRUCTIONS = "smsp__inst_executed.sum"
BYTES = "dram__bytes.sum"
NANOSECONDS = "gpu__time_duration.sum"
CLOCK = "smsp__cycles_elapsed.avg.per_second"
SCHEDULERS = 4  # a multiprocessor; one warp instruction a clock each
MEASURED = [name for name in ROUTES if name not in ("fallback", "resident")]


@dataclass(frozen=True)
class Count:
    """Of one call, over its kernels."""

    instructions: float  # of warps
    bytes: float  # that reached memory
    seconds: float

    @property
    def intensity(self) -> float:
        return self.instructions / self.bytes

    @property
    def rate(self) -> float:
        return self.instructions / self.seconds


def run_once(name: str) -> None:
    """One call under the profiler, after one that is not."""
    case = Case.of(torch.randn(LARGE, device="cuda", dtype=torch.bfloat16))
    arguments = (case.x, case.weight, case.bias)
    call = (lambda: COPIES[name](case.x)) if name in COPIES else (lambda: default(*arguments))
    with torch.no_grad(), route("auto" if name in COPIES else name):
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def rows_of(text: str) -> list[dict[str, str]]:
    """ncu's table, which follows lines of its own; its second line names the units."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]


def count_of(text: str) -> tuple[Count, float]:
    """What ncu printed of one call, and the clock in Hz."""
    rows = rows_of(text)
    if not rows:
        raise ValueError(f"ncu shows no kernel:\n{text[-1000:]}")
    sums = {
        name: sum(float(row[name].replace(",", "")) for row in rows)
        for name in (INSTRUCTIONS, BYTES, NANOSECONDS, CLOCK)
    }
    count = Count(sums[INSTRUCTIONS], sums[BYTES], sums[NANOSECONDS] / 1e9)
    return count, sums[CLOCK] / len(rows)


def profile(name: str) -> tuple[Count, float]:
    metrics = ",".join((INSTRUCTIONS, BYTES, NANOSECONDS, CLOCK))
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics]
    command += ["--clock-control", "none", "--profile-from-start", "off"]
    command += [sys.executable, __file__, "--run", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return count_of(done.stdout)


def measure() -> dict[str, Any]:
    device = torch.device("cuda")
    case = Case.of(torch.empty(LARGE, device=device, dtype=torch.bfloat16))
    counts, missing, clock = {}, {}, 0.0
    for name in ("copy_kernel", *MEASURED):
        why = None
        if name not in COPIES:
            why = why_not_through(name, case.x, case.weight, case.bias)
        if why is not None:
            missing[name] = why
            continue
        counts[name], clock = profile(name)
        print(describe(name, counts[name]), flush=True)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        "kind": "roofline",
        "environment": asdict(environment(device)),
        "shape": LARGE,
        "counts": {name: asdict(count) for name, count in counts.items()},
        "missing": missing,
        "issue_per_second": SCHEDULERS * multiprocessors * clock,
    }


def describe(name: str, count: Count) -> str:
    elements = math.prod(LARGE)
    return (
        f"{name:<12} {32 * count.instructions / elements:6.1f} instructions an element, "
        f"{count.bytes / elements:5.2f} bytes an element, {1e6 * count.seconds:7.1f} us"
    )


def save_roofline(figures: dict[str, Any], path: Path) -> None:
    from pictures import plt, save_figure
    from speed_pictures import STYLES

    counts = {name: Count(**count) for name, count in figures["counts"].items()}
    issue = figures["issue_per_second"]
    bandwidth = counts["copy_kernel"].bytes / counts["copy_kernel"].seconds
    _, axes = plt.subplots(figsize=(9, 6))
    ridge = issue / bandwidth
    reach = [0.6 * counts["copy_kernel"].intensity, 4 * ridge]  # instructions a byte
    roof = [min(issue, bandwidth * x) for x in (reach[0], ridge, reach[1])]
    axes.plot([reach[0], ridge, reach[1]], roof, color="#000000", linewidth=1.5)
    memory = (reach[0] * ridge) ** 0.5  # half way
    axes.annotate(
        "what memory allows, at a copy's speed ",
        (memory, bandwidth * memory),
        fontsize=9,
        ha="right",
        va="bottom",
    )
    axes.annotate("all that is issued", (reach[1], issue), fontsize=9, ha="right", va="bottom")
    for name, count in counts.items():
        style = STYLES.get(name, {"color": "#000000", "marker": "o"})
        label = "a copy" if name == "copy_kernel" else name
        axes.plot(count.intensity, count.rate, style["marker"], color=style["color"], markersize=9)
        axes.annotate(f"  {label}", (count.intensity, count.rate), fontsize=10)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("warp instructions a byte of memory")
    axes.set_ylabel("warp instructions a second")
    axes.grid(alpha=0.3)
    caption = str(Environment(**figures["environment"]))
    shape = "x".join(map(str, figures["shape"]))
    save_figure(
        axes.figure, f"Bytes or instructions: which bounds each route, {shape}", caption, path
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder; by default this one")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("roofline.py counts on a GPU and finds none.", file=sys.stderr)
        return 1
    if arguments.run:
        run_once(arguments.run)
        return 0
    if shutil.which("ncu") is None:
        print("ncu, of the CUDA toolkit, is not in PATH.", file=sys.stderr)
        return 1
    figures = measure()
    arguments.output.mkdir(parents=True, exist_ok=True)
    short = Environment(**figures["environment"]).short_device
    path = arguments.output / f"roofline_{short}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    save_roofline(figures, arguments.output / "roofline.png")
    print(f"saved {path} and {arguments.output / 'roofline.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
