"""gnsilu on a real model and a real photograph: what it computes, how exactly and how fast.

Runs diffusers' AutoencoderKL at the Stable Diffusion configuration (seeded random weights) on a
photograph of scikit-image in BF16 and FP16, and calls gnsilu and PyTorch on the true input of every
GroupNorm + SiLU in it. Prints a table, saves errors.png, speed.png and demo.json. Needs no network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from measure import Environment
    from reference import Comparison
    from rich.console import Console
    from sites import SiteResult

# Modules that the demo needs beyond gnsilu's own requirements, and what pip calls them.
EXTRAS = {"diffusers": "diffusers", "skimage": "scikit-image", "matplotlib": "matplotlib"}


def missing_extras() -> list[str]:
    missing = []
    for module, package in EXTRAS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    return missing


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--size", type=int, help="pixels of a side, a multiple of 8; default 512, on a CPU 96"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parents[1] / "demo", help="folder"
    )
    arguments = parser.parse_args()
    if arguments.size is not None and (arguments.size < 8 or arguments.size % 8):
        parser.error(f"--size must be a positive multiple of 8, got {arguments.size}")
    return arguments


# ----------------------------------------------------------------------------------- measuring


def measure_sites(
    device: torch.device, dtype: torch.dtype, size: int, console: Console
) -> list[SiteResult]:
    from sites import (
        Site,
        autoencoder,
        measure_site,
        photograph,
        run_autoencoder,
        with_activations_of,
    )

    console.print(f"{dtype}: building the autoencoder, encoding and decoding {size}x{size} pixels")
    results: list[SiteResult] = []
    with console.status("building the autoencoder") as status:

        def visit(site: Site) -> None:
            status.update(f"site {len(results) + 1}: {site.name}, {tuple(site.x.shape)}")
            results.append(measure_site(site))

        model = with_activations_of(autoencoder(), dtype, device)
        run_autoencoder(model, photograph(size).to(device, dtype), visit)
    return results


# ------------------------------------------------------------------------------------ reporting


def print_table(results: list[SiteResult], console: Console) -> None:
    from rich.table import Table

    reasons = list(dict.fromkeys((r.route, r.reason) for r in results))
    table = Table(
        title="GroupNorm + SiLU: gnsilu / PyTorch (FP32 inside, one cast)",
        caption="worst ulp: largest error in units in the last place. of allowed: the same as a"
        " share of what is allowed, 1 unit or 2^-20 (|w xhat| + |b|) where the affine cancels."
        " correct: share of correctly rounded elements.",
    )
    table.add_column("site", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("route", no_wrap=True)
    for heading in ("MB moved", "worst ulp", "of allowed", "correct, %", "time, us"):
        table.add_column(heading, justify="right")
    table.add_column("speed-up", justify="right")
    for r in results:
        table.add_row(
            r.name,
            "x".join(map(str, r.shape)),
            r.dtype,
            f"{r.route} ({reasons.index((r.route, r.reason)) + 1})",
            f"{r.megabytes_moved:.1f}",
            f"{r.error.max_ulp:.3f} / {r.error_pytorch.max_ulp:.3f}",
            f"{r.error.max_of_bound:.2f} / {r.error_pytorch.max_of_bound:.2f}",
            f"{100 * r.error.share_correct:.4f} / {100 * r.error_pytorch.share_correct:.4f}",
            f"{r.time.median:.1f} / {r.time_pytorch.median:.1f}",
            f"{r.speed_up:.2f}",
        )
    console.print(table)
    for number, (route, reason) in enumerate(reasons, start=1):
        sites = sum((r.route, r.reason) == (route, reason) for r in results)
        console.print(f"({number}) {route}, {sites} sites: {reason}", highlight=False)


def summary(results: list[SiteResult]) -> str:
    def worst(errors: list[Comparison]) -> str:
        ulp, share = max(e.max_ulp for e in errors), max(e.max_of_bound for e in errors)
        return f"{ulp:.3f} units in the last place, {share:.2f} of what is allowed"

    milliseconds = sum(r.time.median for r in results) / 1000
    milliseconds_pytorch = sum(r.time_pytorch.median for r in results) / 1000
    return (
        f"{len(results)} sites: largest error {worst([r.error for r in results])}"
        f" (PyTorch {worst([r.error_pytorch for r in results])}),"
        f" total time {milliseconds:.2f} ms (PyTorch {milliseconds_pytorch:.2f} ms)."
    )


def save(
    results: list[SiteResult], environment: Environment, size: int, folder: Path, console: Console
) -> None:
    from pictures import save_errors, save_speed

    folder.mkdir(parents=True, exist_ok=True)
    caption = f"AutoencoderKL on a {size}x{size} photograph; {environment}"
    save_errors(results, caption, folder / "errors.png")
    save_speed(results, caption, folder / "speed.png")
    contents = {
        "environment": asdict(environment),
        "picture_size": size,
        "summary": summary(results),
        "sites": [r.as_json() for r in results],
    }
    (folder / "demo.json").write_text(json.dumps(contents, indent=1) + "\n")
    for name in ("errors.png", "speed.png", "demo.json"):
        console.print(f"saved {folder / name}", highlight=False, soft_wrap=True)


def main() -> int:
    arguments = parse_arguments()
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # its advice on casting is not for here
    missing = missing_extras()
    if missing:
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        print(f"The demo needs {' and '.join(missing)}. Install with: {command}", file=sys.stderr)
        return 1
    import torch
    from measure import environment
    from rich.console import Console

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = arguments.size or (512 if device.type == "cuda" else 96)
    if device.type == "cpu":
        torch.set_num_threads(1)  # steady times, also on a shared machine
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a log has no width that a table must fit
    measured_on = environment(device)
    console.print(f"gnsilu on {measured_on}", highlight=False, soft_wrap=True)

    results = []
    for dtype in (torch.bfloat16, torch.float16):
        results += measure_sites(device, dtype, size, console)
    print_table(results, console)
    save(results, measured_on, size, arguments.output, console)
    console.print(summary(results), highlight=False, soft_wrap=True)
    outside = [r.name for r in results if r.route != "fallback" and not r.error.within_bound]
    if outside:
        console.print(f"Outside the promised bound: {', '.join(outside)}", style="bold red")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
