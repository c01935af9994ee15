"""Where a gradient is needed PyTorch's FP32 operators compute: what they give where FP32 fails.

The bounds are those of FP32 arithmetic in any order, so that they hold for the CPU's and the GPU's
group norm alike; docs/exactness.md tells what was measured.
"""

from __future__ import annotations

import gnsilu
import pytest
import torch
from forms import silu_fp64
from inputs import BF16, FP16, FP32, random_x, silu_tail, two_valued
from reference import compare, group_norm_silu_fp64
from torch import Tensor

# Of |x| / deviation: x * scale and its shift are each rounded to FP32, and so is the mean.
FP32_AFFINE = 2.0**-22


def differentiable(
    function, x: Tensor, groups: int, weight=None, bias=None, eps: float = 1e-5, dtype=FP32
) -> Tensor:
    y = function(x.clone().requires_grad_(), groups, weight, bias, eps, dtype)
    assert y.requires_grad
    return y.detach()


def parameters(channels: int, bias: float, device: torch.device) -> list[tuple]:
    """Without and with a weight, since PyTorch's GPU kernels differ there."""
    shift = torch.full((channels,), bias, device=device)
    return [(None, shift), (torch.ones(channels, device=device), shift)]


@pytest.mark.parametrize("scale", [1e20, 1e30, 3e38])
def test_case_02_differentiable_z_is_the_bias_or_nan(scale, device):
    """The variance overflows to infinity: x counts for nothing, or the group is NaN."""
    for shape, groups in (((1, 32, 64, 64), 32), ((1, 4, 3, 3), 2)):
        x = two_valued(shape, -scale, scale, BF16).to(device)
        for weight, bias in parameters(shape[1], 0.5, device):
            z = differentiable(gnsilu.group_norm, x, groups, weight, bias)
            assert (z.isnan() | (z == 0.5)).all()
            y = differentiable(gnsilu.group_norm_silu, x, groups, weight, bias, dtype=BF16)
            assert (y.isnan() | (y == 0.310546875)).all()  # silu(0.5)


def assert_near(z: Tensor, x: Tensor, bias: Tensor, eps: float, relative: float) -> None:
    """z, of one group, but for FP32's rounding of x * scale and for a relative error."""
    x64 = x.double()
    deviation = (x64.var(correction=0) + eps).sqrt()
    exact = group_norm_silu_fp64(x, 1, None, bias, eps, activation=False)
    allowed = FP32_AFFINE * x64.abs().max() / deviation + relative * exact.abs()
    assert ((z.double() - exact).abs() <= allowed).all()


def test_case_03_differentiable_loses_digits_to_the_mean(device):
    """z is off by up to 2^-22 of mean / deviation: 6e-5 at {1000, 1008}, 0.0009 at 60000."""
    for dtype, low, high in (
        (BF16, 1000.0, 1008.0),
        (FP16, 2048.0, 2050.0),
        (FP16, 60000.0, 60032.0),
    ):
        x = two_valued((1, 2, 64, 33), low, high, dtype).to(device)
        for weight, bias in parameters(2, 0.0, device):
            z = differentiable(gnsilu.group_norm, x, 1, weight, bias)
            assert_near(z, x, bias, 1e-5, relative=2.0**-20)


@pytest.mark.parametrize("position", [0, 2**19, 2**20 - 1])
@pytest.mark.parametrize("other", [60032.0, 59968.0, -60000.0])
def test_case_03_differentiable_with_one_other_value_among_a_million(other, position, device):
    """Never NaN. A running mean that stops moving makes the variance up to a half too large."""
    x = torch.full((1, 1, 2**20), 60000.0, dtype=FP16, device=device)
    x[0, 0, position] = other
    for weight, bias in parameters(1, 0.0, device):
        z = differentiable(gnsilu.group_norm, x, 1, weight, bias, 1e-6)
        assert z.isfinite().all()
        assert_near(z, x, bias, 1e-6, relative=0.25)


@pytest.mark.parametrize("size", [1, 3, 147, 1000, 1023, 4096, 2**20 + 1])
def test_case_04_differentiable_constants_are_near_the_bias(size, device):
    """Off by up to 2^-22 of |x| / sqrt(eps), since the shift is rounded; past 1e19 often NaN."""
    for dtype, value in ((FP16, 0.1), (FP16, 255.5), (FP16, 65504.0), (BF16, 0.1), (BF16, 1e30)):
        x = torch.full((1, 1, size), value, dtype=dtype, device=device)
        for eps in (1e-6, 1e-12):
            for weight, bias in parameters(1, 0.5, device):
                z = differentiable(gnsilu.group_norm, x, 1, weight, bias, eps)
                if value < 1e19:
                    assert_near(z, x, bias, eps, relative=2.0**-22)
                else:
                    allowed = FP32_AFFINE * value / eps**0.5
                    assert (z.isnan() | ((z - 0.5).abs() <= allowed)).all()


def test_case_07_differentiable_tail_is_flushed(device):
    """e^-z overflows FP32 below z = -88.73, and y is -0 there: never NaN, never +0."""
    z = silu_tail(device)
    x = torch.zeros(1, len(z), 2, dtype=BF16, device=device)
    bias = z.clone().requires_grad_()
    y = gnsilu.group_norm_silu(x, 1, torch.zeros_like(z), bias).detach()[0, :, 0]
    assert not y.isnan().any() and y.signbit().all()
    assert (y[z < -89] == 0).all()
    kept = z >= -88
    assert compare(y[kept], silu_fp64(z[kept])).max_ulp <= 0.51


def test_case_10_differentiable_z_past_fp32_is_nan(device):
    """z = -infinity in FP32 makes the SiLU NaN, where the exact result is -0."""
    x = random_x((1, 4, 30, 30), BF16, device)
    weight = torch.full((4,), 3e38, device=device, requires_grad=True)
    y = gnsilu.group_norm_silu(x, 2, weight).detach()
    z = group_norm_silu_fp64(x, 2, weight, activation=False)
    largest = torch.finfo(FP32).max
    past, within = z < -1.001 * largest, z > -0.999 * largest
    assert past.any() and y[past].isnan().all() and not y[within].isnan().any()
