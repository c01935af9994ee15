"""Every GroupNorm whose output goes into a SiLU in diffusers' AutoencoderKL, with its true inputs.

The sites are found while the model runs: a hook on each GroupNorm remembers its output, one on each
SiLU sees whether that very tensor comes in. The norms of the attention blocks, which no SiLU
follows, drop out by themselves. A site is measured on the spot, so that no activation is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import gnsilu
import tests_folder  # noqa: F401
import torch
from gnsilu.timing import Timing, cpu_times, device_times
from reference import Comparison, errors_of_each, pytorch_fp32
from torch import Tensor, nn

# --------------------------------------------------------------------------------- the picture


def photograph(size: int) -> Tensor:
    """A photograph that scikit-image carries in its wheel: [1, 3, size, size] from -1 to 1."""
    from skimage import data, transform

    pixels = transform.resize(data.astronaut(), (size, size), anti_aliasing=True)  # 0 to 1
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].mul(2).sub(1).float()


def autoencoder(seed: int = 0) -> nn.Module:
    """AutoencoderKL at the Stable Diffusion configuration, with seeded random weights.

    The norms' weights and biases are drawn too: ones and zeros would hide errors in the affine.
    """
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    levels = (128, 256, 512, 512)
    model = AutoencoderKL(
        block_out_channels=levels,
        down_block_types=("DownEncoderBlock2D",) * len(levels),
        up_block_types=("UpDecoderBlock2D",) * len(levels),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=32,
    )
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
            nn.init.normal_(module.bias, 0.0, 0.2)
    return model.eval()


def with_activations_of(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """model on device, in dtype.

    On a CPU the convolutions and products compute in FP32 between 16-bit inputs and outputs, as
    a GPU's do inside: processors without 16-bit arithmetic take minutes for them otherwise.
    """
    model = model.to(device, dtype)
    if device.type != "cpu":
        return model

    def widen(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t.float() for t in inputs)

    def narrow(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.to(dtype)

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.float()
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(narrow)
    return model


# ----------------------------------------------------------------------------------- the sites


# How short names put the parts of a module's name in the model.
_SHORT = {
    "encoder": "enc",
    "decoder": "dec",
    "down_blocks": "down",
    "mid_block": "mid",
    "up_blocks": "up",
    "conv_norm_out": "out",
}


def short_name(name: str) -> str:
    """decoder.up_blocks.2.resnets.1.norm2 is "dec up 2.1 norm2"."""
    parts = (_SHORT.get(part, part) for part in name.split(".") if part != "resnets")
    return re.sub(r"(\d) (\d)", r"\1.\2", " ".join(parts))


@dataclass(frozen=True)
class Site:
    """A GroupNorm followed by a SiLU, with the activation that has just come in."""

    name: str
    norm: nn.GroupNorm
    x: Tensor


@contextmanager
def watching(model: nn.Module, visit: Callable[[Site], None]) -> Iterator[None]:
    """Calls visit for every GroupNorm that feeds a SiLU while model runs inside this context."""
    pending: list[tuple[Site, Tensor]] = []

    def after_norm(name: str) -> Callable[..., None]:
        def hook(norm: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            pending[:] = [(Site(name, norm, inputs[0]), output)]

        return hook

    def before_silu(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if pending and pending[0][1] is inputs[0]:
            site = pending.pop()[0]
            visit(site)

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.GroupNorm):
            handles.append(module.register_forward_hook(after_norm(name)))
        elif isinstance(module, nn.SiLU):
            handles.append(module.register_forward_pre_hook(before_silu))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_autoencoder(
    model: nn.Module, picture: Tensor, visit: Callable[[Site], None]
) -> tuple[int, ...]:
    """Encodes and decodes the picture once; the shape of the latent."""
    with watching(model, visit):
        latent = model.encode(picture).latent_dist.mode()
        model.decode(latent)
    return tuple(latent.shape)


# ------------------------------------------------------------------------------ what is measured


# Said wherever nothing but the fallback ran.
FALLBACK_ONLY = (
    "On this machine gnsilu is PyTorch's operators (the fallback), of 16-bit x in FP64:"
    " smaller errors, in about twice PyTorch's time, are expected."
)


@dataclass(frozen=True)
class SiteResult:
    name: str
    shape: tuple[int, ...]
    dtype: str
    route: str
    reason: str
    megabytes_moved: float  # counted: what the route reads and writes
    error: Comparison  # gnsilu's against FP64
    error_pytorch: Comparison
    time: Timing  # gnsilu's
    time_pytorch: Timing

    @property
    def speed_up(self) -> float:
        return self.time_pytorch.median / self.time.median

    @property
    def short_name(self) -> str:
        return short_name(self.name)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["error"]["share_correct"] = self.error.share_correct
        fields["error_pytorch"]["share_correct"] = self.error_pytorch.share_correct
        fields["within_bound"] = self.error.within_bound
        return fields


@torch.no_grad()
def measure_site(site: Site) -> SiteResult:
    norm, x = site.norm, site.x
    arguments = (norm.num_groups, norm.weight, norm.bias, norm.eps)
    plan = gnsilu.explain(x, *arguments, x.dtype)
    variants = {
        "gnsilu": lambda x: gnsilu.group_norm_silu(x, *arguments, x.dtype),
        "pytorch": lambda x: pytorch_fp32(x, *arguments),
    }
    errors = errors_of_each({name: f(x) for name, f in variants.items()}, x, *arguments)
    times = device_times(variants, x, 0.1) if x.is_cuda else cpu_times(variants, x)
    return SiteResult(
        name=site.name,
        shape=tuple(x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        route=str(plan.route),
        reason=plan.reason,
        megabytes_moved=plan.bytes_per_element * x.numel() / 1e6,
        error=errors["gnsilu"],
        error_pytorch=errors["pytorch"],
        time=times["gnsilu"],
        time_pytorch=times["pytorch"],
    )
