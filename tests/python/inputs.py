"""Makers of inputs that several tests share, the same values on every device."""

from __future__ import annotations

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [BF16, FP16]


def random_x(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal, mean 0.3 and deviation 2."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2 + 0.3).to(device, dtype)


def random_affine(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight and a bias in FP32."""
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(channels, generator=generator) + 0.5
    return weight.to(device), torch.randn(channels, generator=generator).to(device)


def two_valued(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype) -> Tensor:
    """On the CPU; elements alternate: half low, half high in a group of even size."""
    x = torch.empty(shape)
    x.view(-1)[0::2] = low
    x.view(-1)[1::2] = high
    return x.to(dtype)


def silu_tail(device: torch.device) -> Tensor:
    """z, from where FP16 and BF16 results become subnormal to the lowest FP32 number."""
    named = torch.tensor([-87.0, -88.0, -90.0, -104.0, -1e5, -torch.finfo(FP32).max])
    return torch.cat([named, -torch.linspace(8, 180, 8000), -torch.logspace(2, 38, 500)]).to(device)
