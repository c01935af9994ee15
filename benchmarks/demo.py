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
    from gnsilu.timing import Environment
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


def table_line(site: str, *cells: str) -> str:
    """A line of the table, 80 columns wide."""
    widths = (14, 12, 12, 14, 9)
    return f"{site:19}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def site_line(r: SiteResult) -> str:
    def pair(values: list[float], digits: int) -> str:
        return " / ".join(f"{value:.{digits}f}" for value in values)

    errors = (r.error, r.error_pytorch)
    times = [r.time.median, r.time_pytorch.median]
    return table_line(
        f" {r.short_name}",
        pair([e.max_ulp for e in errors], 2),
        pair([e.max_of_bound for e in errors], 2),
        pair([e.misrounded_per_million for e in errors], 0),
        pair(times, 1 if max(times) < 1000 else 0),
        f"{r.speed_up:.2f}",
    )


def print_table(dtype: str, results: list[SiteResult], console: Console) -> None:
    """The sites of one dtype, in the model's order, and below what the letters stand for.

    What neighbours share, shape, route and bytes, stands once, in a line above them.
    """
    reasons = dict.fromkeys((r.route, r.reason) for r in results)
    letters = {reason: chr(ord("a") + number) for number, reason in enumerate(reasons)}
    console.print(f"\n{dtype}, pairs are gnsilu / PyTorch (FP32 inside, one cast)\n", style="bold")
    headings = ("error, ulp", "of allowed", "misrounded", "time, us", "speed-up")
    console.print(table_line("site", *headings), highlight=False)
    above = None
    for r in results:
        shape = "x".join(map(str, r.shape))
        route = f"{r.route} ({letters[r.route, r.reason]})"
        shared = f"{shape}, {r.megabytes_moved:.1f} MB moved, {route}"
        if shared != above:
            console.print(shared, style="cyan", highlight=False)
        above = shared
        console.print(site_line(r), highlight=False)
    console.print()
    for (route, reason), letter in letters.items():
        sites = sum((r.route, r.reason) == (route, reason) for r in results)
        console.print(f"({letter}) {route}: {reason} ({sites} sites)", highlight=False)


def print_terms(console: Console) -> None:
    console.print(
        "\nerror, ulp   largest, in units in the last place; large where w xhat + b cancels\n"
        "of allowed   largest error as a share of what is allowed: 1 unit or, where more,\n"
        "             2^-20 (|w xhat| + |b|); inf: a wrong NaN, infinity or zero sign\n"
        "misrounded   elements per million that are not correctly rounded\n"
        "MB moved     what the route reads and writes: counted, not measured\n",
        highlight=False,
    )


def summary(results: list[SiteResult]) -> str:
    def largest(name: str) -> tuple[float, float]:
        return (
            max(getattr(r.error, name) for r in results),
            max(getattr(r.error_pytorch, name) for r in results),
        )

    share, share_pytorch = largest("max_of_bound")
    ulp, ulp_pytorch = largest("max_ulp")
    milliseconds = sum(r.time.median for r in results) / 1000
    milliseconds_pytorch = sum(r.time_pytorch.median for r in results) / 1000
    return (
        f"{len(results)} sites: largest error {share:.2f} of what is allowed"
        f" (PyTorch {share_pytorch:.2f}), {ulp:.3f} units in the last place"
        f" (PyTorch {ulp_pytorch:.3f}); total time {milliseconds:.2f} ms"
        f" (PyTorch {milliseconds_pytorch:.2f} ms)."
    )


def fallback_only(results: list[SiteResult]) -> bool:
    return all(r.route == "fallback" for r in results)


def save(
    results: list[SiteResult], environment: Environment, size: int, folder: Path, console: Console
) -> None:
    from pictures import save_errors, save_speed
    from sites import FALLBACK_ONLY

    folder.mkdir(parents=True, exist_ok=True)
    caption = f"AutoencoderKL on a {size}x{size} photograph; {environment}"
    if fallback_only(results):
        caption += f"\n{FALLBACK_ONLY}"
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
    from gnsilu.timing import environment
    from rich.console import Console
    from sites import FALLBACK_ONLY

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = arguments.size or (512 if device.type == "cuda" else 96)
    if device.type == "cpu":
        torch.set_num_threads(1)  # steady times, also on a shared machine
    console = Console(soft_wrap=True)
    measured_on = environment(device)
    console.print(f"gnsilu on {measured_on}", highlight=False, soft_wrap=True)

    by_dtype = {
        dtype: measure_sites(device, dtype, size, console)
        for dtype in (torch.bfloat16, torch.float16)
    }
    for dtype, sites in by_dtype.items():
        print_table(str(dtype).removeprefix("torch."), sites, console)
    print_terms(console)
    results = [r for sites in by_dtype.values() for r in sites]
    save(results, measured_on, size, arguments.output, console)
    if fallback_only(results):
        console.print(FALLBACK_ONLY, highlight=False, soft_wrap=False)
    console.print(summary(results), highlight=False, soft_wrap=True)
    outside = [r.name for r in results if not r.error.within_bound]
    if outside:
        console.print(f"Outside the promised bound: {', '.join(outside)}", style="bold red")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
