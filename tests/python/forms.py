"""Calls in every form: with and without SiLU, to every result dtype."""

from __future__ import annotations

from collections.abc import Iterable

import gnsilu
import torch
from inputs import BF16, FP16, FP32
from reference import assert_exact, group_norm_silu_fp64, round_to
from torch import Tensor

FUNCTIONS = {True: gnsilu.group_norm_silu, False: gnsilu.group_norm}

# silu(-1) and silu(1), rounded.
SILU_OF_ONE = {BF16: (-0.26953125, 0.73046875), FP16: (-0.26904296875, 0.73095703125)}


def assert_every_form_exact(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtypes: Iterable[torch.dtype] = (BF16, FP16, FP32),
) -> None:
    for activation, function in FUNCTIONS.items():
        for dtype in dtypes:
            y = function(x, num_groups, weight, bias, eps, dtype)
            assert y.dtype == dtype
            assert_exact(y, x, num_groups, weight, bias, eps, activation)


def assert_plus_and_minus_one(x: Tensor, num_groups: int, eps: float) -> None:
    """x with two values in each group, half and half, so far apart that eps does not count."""
    groups = x.view(x.shape[0], num_groups, -1)
    upper = (groups == groups.amax(-1, keepdim=True)).view(x.shape)
    for dtype, (minus, plus) in SILU_OF_ONE.items():
        y = gnsilu.group_norm_silu(x, num_groups, eps=eps, dtype=dtype)
        assert torch.equal(y, torch.where(upper, plus, minus).to(dtype))
        z = gnsilu.group_norm(x, num_groups, eps=eps, dtype=dtype)
        assert torch.equal(z, torch.where(upper, 1.0, -1.0).to(dtype))


def silu_fp64(z: Tensor) -> Tensor:
    """Through the reference, whose FP64 exponential does not overflow."""
    x = torch.zeros(1, len(z), 1, dtype=torch.float64, device=z.device)  # so z is not rounded
    return group_norm_silu_fp64(x, 1, None, z)[0, :, 0]


def silu_of(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once."""
    return round_to(silu_fp64(z), dtype)
