"""The inputs that exactness is measured on, drawn from torch's default generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Shape = tuple[int, ...]
Device = torch.device | str


def normal(shape: Shape, dtype: torch.dtype, device: Device, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=device) + mean).to(dtype)


def uniform(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """From 0 to 1."""
    return torch.rand(shape, device=device).to(dtype)


def decoder_like(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Mean 0.3, deviation 4, one element of 1000 at 60."""
    x = 4 * torch.randn(shape, device=device) + 0.3
    return x.masked_fill_(torch.rand(shape, device=device) < 1e-3, 60.0).to(dtype)


def channel_means(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Deviation 1 about a mean of each channel's own, uniform from -1000 to 1000."""
    means = 2000 * torch.rand((1, shape[1], *(1 for _ in shape[2:])), device=device) - 1000
    return torch.randn(shape, device=device).add_(means).to(dtype)


def one_of(low: float, high: float, shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    return torch.where(torch.rand(shape, device=device) < 0.5, low, high).to(dtype)


def two_valued(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Neighbours in BF16 at 1000: any rounding of the mean shows."""
    return one_of(1000.0, 1008.0, shape, dtype, device)


def huge(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Uniform; in BF16 squares overflow FP32, in FP16 they overflow FP16."""
    largest = 1e30 if dtype == torch.bfloat16 else 6e4
    return ((2 * torch.rand(shape, device=device) - 1) * largest).to(dtype)


def tiny(shape: Shape, dtype: torch.dtype, device: Device) -> Tensor:
    """Two-valued; in FP16 the smallest subnormals."""
    value = 1e-20 if dtype == torch.bfloat16 else 2.0**-24
    return one_of(-value, value, shape, dtype, device)


@dataclass(frozen=True)
class Distribution:
    draw: Callable[[Shape, torch.dtype, Device], Tensor]
    # As activations are: of so many values that a share of misrounded elements means something.
    ordinary: bool = False
    # Of the affine; 0 where it would hide what becomes of x.
    bias_deviation: float = 0.2


DISTRIBUTIONS = {
    "N(0,1)": Distribution(normal, ordinary=True),
    "decoder-like": Distribution(decoder_like, ordinary=True),
    "uniform [0,1)": Distribution(uniform, ordinary=True),
    "channel means ±1000": Distribution(channel_means),
    "N(1000,1)": Distribution(partial(normal, mean=1000.0)),
    "two-valued": Distribution(two_valued),
    "huge": Distribution(huge),
    "tiny": Distribution(tiny, bias_deviation=0.0),
}


def affine(
    distribution: Distribution, channels: int, dtype: torch.dtype, device: Device
) -> tuple[Tensor, Tensor]:
    """A weight about 1 and a bias about 0 in FP32, of values that dtype has.

    So nothing is lost where an implementation wants them in x's type.
    """
    weight, bias = torch.randn(2, channels, device=device)
    weight, bias = 1 + 0.2 * weight, distribution.bias_deviation * bias
    return weight.to(dtype).float(), bias.to(dtype).float()
