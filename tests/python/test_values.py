"""Ordinary values against FP64, on every route: exact on all of them."""

from __future__ import annotations

import itertools

import gnsilu
import pytest
import torch
import torch.nn.functional as F
from forms import FUNCTIONS
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x, two_valued
from reference import MIN_SHARE, assert_exact, errors_of
from torch import Tensor

# (N, C, H, W), groups: spatial sizes that are odd, tiny and large; 1 to 40 channels a group; groups
# of one span, of several, and with a last span cut short.
SHAPES = [
    ((2, 64, 16, 16), 32),
    ((1, 32, 1, 31), 8),
    ((3, 30, 7, 7), 10),
    ((2, 48, 31, 33), 16),
    ((1, 12, 33, 31), 12),
    ((2, 40, 3, 3), 1),
    ((1, 128, 64, 64), 32),
    ((1, 6, 113, 89), 2),
    ((2, 320, 16, 16), 32),
    ((1, 30, 1, 6141), 3),
    ((1, 3, 257, 255), 1),
]


@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_ordinary_activations_are_exact(shape, groups, routed_device):
    for dtype, (activation, function) in itertools.product(HALVES, FUNCTIONS.items()):
        x = random_x(shape, dtype, routed_device)
        weight, bias = random_affine(shape[1], routed_device)
        y = function(x, groups, weight, bias, 1e-6)
        assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
        assert_exact(y, x, groups, weight, bias, 1e-6, activation)


@pytest.mark.parametrize("dtype", HALVES)
def test_share_of_correctly_rounded_elements(dtype, routed_device):
    x = random_x((2, 128, 96, 96), dtype, routed_device)
    weight, bias = random_affine(128, routed_device)
    y = gnsilu.group_norm_silu(x, 32, weight, bias)
    assert_exact(y, x, 32, weight, bias, min_share=MIN_SHARE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_x_is_computed_in_its_own_precision(dtype, device):
    x = torch.randn(2, 32, 9, 9, dtype=dtype, device=device)
    weight, bias = random_affine(32, device)
    y = gnsilu.group_norm_silu(x, 8, weight, bias)
    want = F.silu(F.group_norm(x.double(), 8, weight.double(), bias.double()))
    assert y.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
    assert gnsilu.group_norm_silu(x, 8, dtype=BF16).dtype == BF16


# ---------------------------------------------------------------------------- very large groups


def assert_uniform_is_exact(shape: tuple[int, ...], groups: int, device: torch.device) -> None:
    torch.manual_seed(groups)
    for dtype in HALVES:
        x = torch.rand(shape, device=device).to(dtype)
        y = gnsilu.group_norm_silu(x, groups, eps=1e-6)
        found = errors_of(y, x, groups, eps=1e-6)
        assert found.within_bound and found.max_ulp <= 1, found


def test_case_06_groups_of_five_million_elements(routed_device):
    """All of one sign: the sum of x is as large as it gets against each x."""
    assert_uniform_is_exact((1, 1, 1536, 3072), 1, routed_device)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["auto", "two_pass", "three_pass", "fallback"])
@pytest.mark.parametrize("groups", [4, 8, 16])
def test_case_06_groups_of_up_to_forty_million_elements(groups, route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    assert_uniform_is_exact((1, 32, 1536, 3072), groups, torch.device("cuda"))


# ---------------------------------------------------------------------------------------- eps


def test_case_11_eps_is_used_each_time(routed_device):
    """In any order of calls, by functions and modules: eps is remembered nowhere."""
    small = two_valued((1, 4, 8, 8), -(2.0**-10), 2.0**-10, BF16).to(routed_device)
    large = two_valued((1, 4, 65, 64), -(2.0**-10), 2.0**-10, FP16).to(routed_device)
    want = {1e-6: 0.6986730, 1e-5: 0.2950667, 1e-3: 0.0308669, 1.0: 0.0009766}
    modules = {eps: gnsilu.GroupNormSiLU(2, 4, eps, affine=False, dtype=FP32) for eps in want}
    for order in itertools.permutations(want):
        for eps in order:
            exact = 2.0**-10 / (2.0**-20 + eps) ** 0.5
            assert exact == pytest.approx(want[eps], abs=5e-8)
            for x in (small, large):
                z = gnsilu.group_norm(x, 2, eps=eps, dtype=FP32)
                signed = torch.sign(x.float()) * exact
                torch.testing.assert_close(z, signed, rtol=2.0**-22, atol=0)
                y = modules[eps](x)
                torch.testing.assert_close(y, F.silu(signed), rtol=2.0**-20, atol=0)


# ------------------------------------------------------------------------- decoder-like values


def with_outliers(shape: tuple[int, ...]) -> Tensor:
    """Mean 0.3, deviation 4, one element in a thousand at 60."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(shape, generator=generator) * 4 + 0.3
    x[torch.rand(shape, generator=generator) < 1e-3] = 60.0
    return x


def with_channel_means(shape: tuple[int, ...]) -> Tensor:
    """Deviation 1 about means of the channels between -1000 and 1000."""
    generator = torch.Generator().manual_seed(13)
    means = torch.rand(shape[1], generator=generator) * 2000 - 1000
    return torch.randn(shape, generator=generator) + means.view(1, -1, 1, 1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", [with_outliers, with_channel_means])
@pytest.mark.parametrize("groups", [32, 128])
def test_case_13_decoder_like_activations(make, groups, dtype, routed_device):
    x = make((1, 128, 96, 96)).to(routed_device, dtype)
    weight, bias = random_affine(128, routed_device)
    for parameters in ((None, None), (weight, bias)):
        for activation, function in FUNCTIONS.items():
            y = function(x, groups, *parameters, 1e-6)
            found = assert_exact(y, x, groups, *parameters, 1e-6, activation)
            assert found.max_of_bound < 0.6, found
            if make is with_outliers:
                assert found.share_correct >= MIN_SHARE[dtype], found
            # Else a channel takes some ten values, and one near a tie is a share of 0.001.
