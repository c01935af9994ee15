"""How long a decoder takes, and how much memory, with gnsilu.patch and without.

    python benchmarks/decode.py --output benchmarks/results

Decodes latents by diffusers' AutoencoderKL at the Stable Diffusion configuration (seeded random
weights) in BF16, eager and compiled, and prints a line for each size and way. Writes
decode_<gpu>.json and, where matplotlib is installed, decode.png. Compiling takes minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gnsilu
import torch
from gnsilu.timing import Environment, Timing, environment, one_call
from torch import Tensor, nn

SIZES = (512, 1024, 1536, 2048)  # of the picture
DTYPE = torch.bfloat16
SAMPLES = 7
WAYS = ("eager", "compiled")
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One way to decode pictures of one size."""

    size: int
    way: str
    patched: bool
    time: Timing | None
    """None where memory did not suffice."""
    peak_mib: float | None
    """Allocated at most while decoding, beside the model and the latent."""

    def __str__(self) -> str:
        what = f"{self.size:5} {self.way:<9} {'gnsilu' if self.patched else 'as it is':<9}"
        if self.time is None or self.peak_mib is None:
            return f"{what} out of memory"
        ms = f"{self.time.median / 1000:8.2f} ms ({self.time.p10 / 1000:.2f}-"
        return f"{what} {ms}{self.time.p90 / 1000:.2f}) {self.peak_mib:8.0f} MiB"


def latent_of(model: nn.Module, size: int, device: torch.device) -> Tensor:
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    shape = (1, model.config.latent_channels, size // factor, size // factor)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, DTYPE)


def models_of(model: nn.Module, way: str) -> dict[bool, nn.Module]:
    """By whether it is patched; compiled for all sizes at once."""
    models = {False: copy.deepcopy(model), True: model}
    gnsilu.patch(models[True])
    if way == "compiled":
        torch.compiler.reset()
        for decoding in models.values():
            decoding.decoder = torch.compile(decoding.decoder, dynamic=True)
    return models


def peak_of(decode: Callable[[], Tensor]) -> float:
    """MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decode()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


@torch.no_grad()
def measure(models: dict[bool, nn.Module], way: str, size: int) -> list[Result]:
    """Interleaved, so that clocks and neighbours hit both alike."""
    device = next(models[True].parameters()).device
    latent = latent_of(models[True], size, device)
    decodes = {
        patched: lambda model=model: model.decode(latent).sample
        for patched, model in models.items()
    }
    times: dict[bool, list[float]] = {}
    peaks = {}
    for patched, decode in decodes.items():
        try:
            for _ in range(2):  # compiles, tunes
                decode()
            peaks[patched] = peak_of(decode)
        except torch.OutOfMemoryError:
            continue
        times[patched] = []
    for _ in range(SAMPLES):
        for patched, found in times.items():
            found.append(one_call(decodes[patched]))
    return [
        Result(
            *(size, way, patched),
            Timing.of(times[patched]) if patched in times else None,
            peaks.get(patched),
        )
        for patched in decodes
    ]


def save_picture(figures: dict[str, Any], path: Path) -> None:
    """Time and memory by size: bars for each way, as the model is and patched."""
    from pictures import GNSILU, PYTORCH, plt, save_figure

    rows = figures["rows"]
    sizes = sorted({row["size"] for row in rows})
    figure, panels = plt.subplots(1, 2, figsize=(12, 5))
    kinds = [(way, patched) for way in WAYS for patched in (False, True)]
    for number, (way, patched) in enumerate(kinds):
        of_kind = {r["size"]: r for r in rows if (r["way"], r["patched"]) == (way, patched)}
        found = [size for size in sizes if size in of_kind and of_kind[size]["time"]]
        places = [sizes.index(size) + 0.2 * (number - 1.5) for size in found]
        style = GNSILU if patched else PYTORCH
        label = f"{way}, {'gnsilu.patch' if patched else 'as it is'}"
        hatch = "//" if way == "compiled" else ""
        heights = (
            [of_kind[size]["time"]["median"] / 1000 for size in found],
            [of_kind[size]["peak_mib"] / 1024 for size in found],
        )
        for axes, values in zip(panels, heights, strict=True):
            axes.bar(places, values, 0.18, color=style["color"], hatch=hatch, label=label)
    for axes, title in zip(panels, ("time, ms", "memory beside the model, GiB"), strict=True):
        axes.set_xticks(range(len(sizes)), [f"{size}x{size}" for size in sizes])
        axes.set_ylabel(title)
        axes.grid(axis="y", alpha=0.3)
    panels[0].legend()
    caption = str(Environment(**figures["environment"]))
    save_figure(figure, "Decoding a picture: AutoencoderKL, BF16", caption, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder; by default this one")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the picture")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    arguments = parser.parse_args()
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if not torch.cuda.is_available():
        print("decode.py measures on a GPU and finds none.", file=sys.stderr)
        return 1
    from sites import autoencoder

    device = torch.device("cuda")
    path = arguments.output / f"decode_{environment(device).short_device}.json"
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "kind": "decode",
        "environment": asdict(environment(device)),
        "rows": [],
    }
    for way in arguments.ways:
        models = models_of(autoencoder().to(device, DTYPE).eval(), way)
        for size in arguments.sizes:
            for result in measure(models, way, size):
                print(result, flush=True)
                figures["rows"].append(asdict(result))
            path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    print(f"saved {path}")
    try:
        save_picture(figures, arguments.output / "decode.png")
    except ImportError:
        print("No picture: pip install matplotlib")
    return 0


if __name__ == "__main__":
    sys.exit(main())
