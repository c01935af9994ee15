"""The SiLU and the last rounding: its tail, ties, overflow and affine maps of any size."""

from __future__ import annotations

import gnsilu
import pytest
import torch
import torch.nn.functional as F
from forms import FUNCTIONS, assert_every_form_exact, silu_fp64
from inputs import BF16, FP16, FP32, HALVES, random_x, silu_tail, two_valued
from reference import assert_exact, compare, group_norm_silu_fp64, round_to, same_bits
from torch import Tensor

# Misrounding by FP32's own errors, in units of a 16-bit type, where they are largest (e^-87).
NEAREST = 0.505


def by_bias(z: Tensor, activation: bool, dtype: torch.dtype) -> Tensor:
    """The result [C] for z [C] given as the bias, behind a weight of 0."""
    x = random_x((1, len(z), 2), BF16, z.device)
    y = FUNCTIONS[activation](x, 1, torch.zeros_like(z), z, dtype=dtype)
    first, second = y[0].t().contiguous()
    assert same_bits(first, second)
    return first


# ----------------------------------------------------------------------------------- the tail


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_case_07_tail_of_the_silu(dtype, routed_device):
    """No NaN, no +0, and no flush where e^-z overflows FP32 (-88.73); nearest throughout."""
    z = silu_tail(routed_device)
    y, y64 = by_bias(z, True, dtype), silu_fp64(z)
    assert not y.isnan().any() and y.signbit().all()
    if dtype == BF16:
        assert y[1].item() == pytest.approx(-5.3191e-37, rel=1e-4)
    if dtype == FP32:  # where z is large, its own last place moves e^z by many of y's
        error = (y.double() - y64).abs()
        assert (error <= y64.abs() * (z.double().abs() * 2.0**-22 + 2.0**-22) + 2.0**-149).all()
        return
    found = compare(y, y64)
    assert found.max_ulp <= NEAREST
    assert found.mismatched_nonfinite == found.wrong_zero_sign == 0


def test_case_07_large_z_stays(routed_device):
    """Above the tail's mirror image sigmoid is 1: y is z, rounded."""
    z = -silu_tail(routed_device)
    z = z[z > 40]
    for dtype in (BF16, FP16, FP32):
        assert same_bits(by_bias(z, True, dtype), round_to(z.double(), dtype))


@pytest.mark.parametrize("weighted", [True, False])
def test_case_07_an_infinite_bias_gives_what_torch_gives(weighted, routed_device):
    """At -inf that is NaN (-inf * 0) up to torch 2.11; no other channel is touched."""
    bias = torch.tensor([-float("inf"), float("inf"), 0.5, -90.0], device=routed_device)
    x = torch.zeros(1, 4, 40, device=routed_device, dtype=BF16)
    weight = torch.zeros(4, device=routed_device) if weighted else None
    for dtype in (BF16, FP16, FP32):
        y = gnsilu.group_norm_silu(x, 1, weight, bias, dtype=dtype)
        want = F.silu(bias[:2]).to(dtype).view(2, 1).expand(2, 40)
        torch.testing.assert_close(y[0, :2], want, rtol=0, atol=0, equal_nan=True)
        assert_exact(y[:, 2:].contiguous(), x[:, 2:], 1, None, bias[2:])
        z = gnsilu.group_norm(x, 1, weight, bias, dtype=dtype)
        assert torch.equal(z[0, :2], bias[:2].to(dtype).view(2, 1).expand(2, 40))


# --------------------------------------------------------------------------------------- ties


def ties(dtype: torch.dtype) -> Tensor:
    """FP64: halfway between each two adjacent numbers from 0 up, the last one infinity's."""
    values = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    low = values[values.isfinite()].double()
    past_the_largest = 2 * low[-1:] - low[-2:-1]
    return (low + torch.cat([low[1:], past_the_largest])) / 2


def beside(values: Tensor) -> list[Tensor]:
    """FP32 values one unit towards 0, themselves, and one unit away from it."""
    return [(values.view(torch.int32) + step).view(FP32) for step in (-1, 0, 1)]


@pytest.mark.parametrize("dtype", HALVES)
def test_case_09_every_tie_without_silu(dtype, routed_device):
    """The bias itself lies halfway: to even, and one FP32 unit beside it to that side."""
    positive = ties(dtype).float().to(routed_device)
    for z in (*beside(positive), *beside(-positive)):
        assert same_bits(by_bias(z, False, dtype), round_to(z.double(), dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_case_09_every_tie_of_a_large_z(dtype, routed_device):
    """Where sigmoid is 1 in FP64 the SiLU has exact ties, up to the one with infinity."""
    positive = ties(dtype).float()
    for z in beside(positive[positive > 40].to(routed_device)):
        assert same_bits(by_bias(z, True, dtype), round_to(z.double(), dtype))


def where_silu_is(y: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """z between low and high with silu(z) = y, where the SiLU is monotonic; by bisection."""
    rising = silu_fp64(high) > silu_fp64(low)
    for _ in range(70):
        middle = (low + high) / 2
        up = (silu_fp64(middle) < y) == rising
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return (low + high) / 2


LOWEST = -1.2784645427610738  # where the SiLU has its minimum, -0.278


@pytest.mark.parametrize("branch", ["above 0", "down to the minimum", "below the minimum"])
@pytest.mark.parametrize("dtype", HALVES)
def test_case_09_every_tie_of_the_silu(dtype, branch, routed_device):
    """z whose SiLU is next to a tie, and FP32's neighbours: nearest but for FP32's own error."""
    tie = ties(dtype)
    if branch == "above 0":
        tie = tie[tie < 40]
        z = where_silu_is(tie, tie, 2 * tie)
    else:
        tie = -tie[tie < 0.2784]
        lowest = torch.full_like(tie, LOWEST)
        if branch == "down to the minimum":
            z = where_silu_is(tie, (4.6 * tie).maximum(lowest), 2 * tie)
        else:
            z = where_silu_is(tie, torch.full_like(tie, -120.0), lowest)
    for near in beside(z.float().to(routed_device)):
        found = compare(by_bias(near, True, dtype), silu_fp64(near))
        assert found.max_ulp <= NEAREST
        assert found.mismatched_nonfinite == found.wrong_zero_sign == 0


# ------------------------------------------------------------------------------ affine maps


def test_case_10_results_past_the_range(routed_device):
    """z = 1e5 is past FP16's range, and -1e5 far down in the SiLU's tail."""
    for x_dtype in HALVES:
        x = two_valued((1, 4, 16, 17), -1.0, 1.0, x_dtype).to(routed_device)
        weight = torch.full((4,), 1e5, device=routed_device)
        for dtype, top in ((FP16, float("inf")), (BF16, 99840.0), (FP32, 1e5)):
            y = gnsilu.group_norm_silu(x, 2, weight, eps=0.0, dtype=dtype)
            assert same_bits(y, torch.where(x > 0, top, -0.0).to(dtype))
            z = gnsilu.group_norm(x, 2, weight, eps=0.0, dtype=dtype)
            assert same_bits(z, torch.where(x > 0, top, -top).to(dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_case_10_weights_of_every_size(sign, routed_device):
    """A channel for each, from FP32's smallest normal number to its largest."""
    weight = sign * torch.cat([torch.logspace(-37, 38, 165), torch.tensor([1.71e38, 3.4e38, 0.0])])
    weight = weight.to(routed_device)
    for x_dtype in HALVES:
        x = random_x((1, 168, 9, 11), x_dtype, routed_device)
        for bias in (None, weight.flip(0) / 3):
            assert_every_form_exact(x, 2, weight, bias, dtypes=HALVES)
            for function in FUNCTIONS.values():
                assert not function(x, 2, weight, bias).isnan().any()
    # FP32 results: where their last place is not lost to underflow.
    x, weight = x[:, 28:].contiguous(), weight[28:].contiguous()
    assert_every_form_exact(x, 2, weight, dtypes=[FP32])


@pytest.mark.parametrize("factor", [1.0, 100.0, 1e4, -1e4, 1e6, 1e30])
def test_case_10_an_affine_map_that_cancels(factor, routed_device):
    """A bias that takes z of one value of x back to about 0: the promised bound."""
    # What 1e30 leaves of a cancellation, within the bound, is past FP16's range or is not.
    dtypes = (BF16, FP16, FP32) if abs(factor) < 1e30 else (BF16, FP32)
    for x_dtype in HALVES:
        x = two_valued((1, 4, 16, 17), -1.0, 1.0, x_dtype).to(routed_device)
        weight = torch.full((4,), factor, device=routed_device)
        bias = weight * torch.tensor([-1.0, 1.0, -1.0, 1.0], device=routed_device)
        assert_every_form_exact(x, 2, weight, bias / (1 + 1e-5) ** 0.5, dtypes=dtypes)

        x = random_x((1, 4, 33, 65), x_dtype, routed_device)
        weight = torch.full((4,), factor, device=routed_device)
        xhat = group_norm_silu_fp64(x, 2, activation=False)[0, :, 7, 7]
        assert_every_form_exact(x, 2, weight, -(weight * xhat).float(), dtypes=dtypes)
