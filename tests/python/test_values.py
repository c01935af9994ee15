"""Values against FP64, on the CPU (fallback) and the GPU (three_pass): exact on both."""

from __future__ import annotations

import gnsilu
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MIN_SHARE, assert_exact
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [BF16, FP16]
FUNCTIONS = {True: gnsilu.group_norm_silu, False: gnsilu.group_norm}

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


def random_x(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2 + 0.3).to(device, dtype)


def random_affine(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(channels, generator=generator) + 0.5
    return weight.to(device), torch.randn(channels, generator=generator).to(device)


def two_valued(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Half of each group low, half high (elements alternate)."""
    x = torch.empty(shape)
    x.view(-1)[0::2] = low
    x.view(-1)[1::2] = high
    return x.to(dtype)


@pytest.mark.parametrize("activation", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_ordinary_activations_are_exact(shape, groups, dtype, activation, device):
    x = random_x(shape, dtype, device)
    weight, bias = random_affine(shape[1], device)
    y = FUNCTIONS[activation](x, groups, weight, bias, 1e-6)
    assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
    assert_exact(y, x, groups, weight, bias, 1e-6, activation)


@pytest.mark.parametrize("dtype", HALVES)
def test_share_of_correctly_rounded_elements(dtype, device):
    x = random_x((2, 128, 96, 96), dtype, device)
    weight, bias = random_affine(128, device)
    y = gnsilu.group_norm_silu(x, 32, weight, bias)
    assert_exact(y, x, 32, weight, bias, min_share=MIN_SHARE[dtype])


@pytest.mark.parametrize("y_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("x_dtype", HALVES)
@pytest.mark.parametrize("shape", [(2, 64, 31, 33), (1, 16, 80, 80)], ids=str)
def test_every_result_dtype(shape, x_dtype, y_dtype, device):
    x = random_x(shape, x_dtype, device)
    weight, bias = random_affine(shape[1], device)
    for autocast in (None, BF16, FP16):
        with torch.autocast(device.type, dtype=autocast or BF16, enabled=autocast is not None):
            y = gnsilu.group_norm_silu(x, 8, weight, bias, 1e-5, y_dtype)
        assert y.dtype == y_dtype
        assert_exact(y, x, 8, weight, bias)


@pytest.mark.parametrize("weight_dtype", [None, BF16, FP16, FP32, torch.float64])
@pytest.mark.parametrize("bias_dtype", [None, BF16, FP16, FP32, torch.float64])
def test_parameters_of_every_dtype(weight_dtype, bias_dtype, device):
    x = random_x((2, 24, 20, 20), BF16, device)
    weight, bias = random_affine(24, device)
    weight = None if weight_dtype is None else weight.to(weight_dtype)
    bias = None if bias_dtype is None else bias.to(bias_dtype)
    assert_exact(gnsilu.group_norm_silu(x, 4, weight, bias), x, 4, weight, bias)


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


# --- special inputs: exact on every route ------------------------------------------------------


@pytest.mark.parametrize("value", [0.1, 255.5, 65504.0, -3.0, 1e30, 3.3e38])
@pytest.mark.parametrize("size", [1, 3, 147, 1000, 4096, 9001])
def test_constant_groups_give_silu_of_the_bias(value, size, device):
    for dtype in [BF16] if value > 65504 else HALVES:
        x = torch.full((1, 4, size), value, dtype=dtype, device=device)
        bias = torch.tensor([0.0, 1.0, -2.0, 0.3], device=device)
        for eps in (1e-6, 1e-12):
            y = gnsilu.group_norm_silu(x, 2, None, bias, eps)
            want = F.silu(bias.double()).to(FP32).to(dtype)
            assert torch.equal(y, want.view(1, 4, 1).expand_as(y))
            assert not gnsilu.group_norm_silu(x, 2, eps=eps).any()


@pytest.mark.parametrize("samples", [1, 3])
def test_one_element_a_group_gives_silu_of_the_bias(samples, device):
    x = torch.tensor([3.0, -2.0, 0.5, 60000.0], device=device).to(BF16).repeat(samples, 1)
    bias = torch.tensor([0.0, 1.0, -2.0, 0.3], device=device)
    for shape in ((samples, 4), (samples, 4, 1, 1)):
        y = gnsilu.group_norm_silu(x.view(shape), 4, None, bias)
        want = F.silu(bias.double()).to(FP32).to(BF16)
        assert torch.equal(y.view(samples, 4), want.expand(samples, 4))


def test_eps_zero_on_a_constant_group_is_nan(device):
    x = torch.ones(1, 4, 100, dtype=BF16, device=device)
    assert gnsilu.group_norm_silu(x, 2, eps=0.0).isnan().all()


TWO_VALUES = [(-0.5, 0.5), (-2.0, 2.0), (1000.0, 1008.0), (-60000.0, 60000.0)]


@pytest.mark.parametrize(("low", "high"), TWO_VALUES)
@pytest.mark.parametrize("shape", [(1, 8, 16, 16), (2, 8, 64, 33)], ids=str)
def test_two_valued_groups_are_plus_and_minus_one(low, high, shape, device):
    for dtype, minus, plus in (
        (BF16, -0.26953125, 0.73046875),
        (FP16, -0.26904296875, 0.73095703125),
    ):
        x = two_valued(shape, low, high, dtype).to(device)
        y = gnsilu.group_norm_silu(x, 4, eps=1e-12)
        want = torch.where(x == x.max(), plus, minus).to(dtype)
        assert torch.equal(y, want)


def test_smallest_fp16_values_are_not_flushed(device):
    x = two_valued((1, 4, 32, 32), -(2.0**-24), 2.0**-24, FP16).to(device)
    y = gnsilu.group_norm(x, 2, eps=1e-6, dtype=FP32)
    torch.testing.assert_close(y, torch.sign(x.float()) * (1000 * 2.0**-24), rtol=1e-5, atol=0)
    half = gnsilu.group_norm_silu(x, 2, eps=1e-6)
    assert_exact(half, x, 2, eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e30, 3e38])
def test_every_magnitude_of_bf16_is_exact(scale):
    x = two_valued((1, 32, 64, 64), -scale, scale, BF16).cuda()
    y = gnsilu.group_norm_silu(x, 32, eps=0.0)
    assert torch.equal(y, torch.where(x > 0, 0.73046875, -0.26953125).to(BF16))
    assert_exact(gnsilu.group_norm_silu(x, 32, eps=1e-6), x, 32, eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("spatial", [9, 65, 300])
def test_scaling_by_a_power_of_two_changes_no_bit(spatial):
    x = random_x((1, 16, spatial, spatial), BF16, torch.device("cuda"))
    want = gnsilu.group_norm_silu(x, 4, eps=2.0**-20)
    for k in (-40, -3, 5, 60):
        y = gnsilu.group_norm_silu(x * 2.0**k, 4, eps=2.0 ** (2 * k - 20))
        assert torch.equal(y, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spatial", [16, 70])
def test_a_nan_or_infinity_spoils_its_group_alone(bad, spatial, device):
    x = random_x((2, 16, spatial, spatial), BF16, device)
    want = gnsilu.group_norm_silu(x, 4)
    for position in (0, 4 * spatial * spatial // 2, 4 * spatial * spatial - 1):
        poisoned = x.clone()
        poisoned.view(8, -1)[5, position] = bad
        y = gnsilu.group_norm_silu(poisoned, 4).view(8, -1)
        assert y[5].isnan().all()
        others = [i for i in range(8) if i != 5]
        assert torch.equal(y[others], want.view(8, -1)[others])


@pytest.mark.parametrize("bits", [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF])
def test_every_kind_of_nan(bits, device):
    x = random_x((1, 8, 5, 5), BF16, device)
    want = gnsilu.group_norm_silu(x, 4)
    x.view(torch.int16)[0, 2, 2, 2] = bits - 0x10000 if bits > 0x7FFF else bits
    y = gnsilu.group_norm_silu(x, 4)
    assert y[:, 2:4].isnan().all()
    assert torch.equal(y[:, :2], want[:, :2]) and torch.equal(y[:, 4:], want[:, 4:])


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [1e-30, 1e30, 1.71e38, 3e38])
def test_extreme_weights(weight):
    x = random_x((1, 4, 30, 30), BF16, torch.device("cuda"))
    values = torch.full((4,), weight, device="cuda")
    y = gnsilu.group_norm_silu(x, 2, values)
    assert_exact(y, x, 2, values)
    assert not y.isnan().any()


@pytest.mark.gpu
def test_an_affine_map_that_cancels():
    """weight 1e4 and a bias that takes z of one value back to about 0: the promised bound."""
    x = two_valued((1, 4, 16, 16), -1.0, 1.0, BF16).cuda()
    weight = torch.full((4,), 1e4, device="cuda")
    bias = torch.full((4,), -1e4 / (1 + 1e-5) ** 0.5, device="cuda")
    for dtype in (BF16, FP16, FP32):
        assert_exact(gnsilu.group_norm_silu(x, 2, weight, bias, dtype=dtype), x, 2, weight, bias)


@pytest.mark.parametrize("dtype", HALVES)
def test_halfway_between_two_results(dtype, device):
    """A bias whose SiLU lies at a tie of the result's type, and one FP32 unit beside it."""
    ties = torch.arange(0.5, 2.0, 1 / 64, dtype=torch.float64)
    ties = ties + (2.0**-9 if dtype == BF16 else 2.0**-12)
    bias = torch.full_like(ties, 1.0)
    for _ in range(60):  # Newton: silu(bias) = tie
        s = torch.sigmoid(bias)
        bias = bias - (bias * s - ties) / (s * (1 + bias * (1 - s)))
    near = bias.to(FP32)
    for shift in (-1, 0, 1):
        values = (near.view(torch.int32) + shift).view(FP32).to(device)
        x = torch.zeros(1, len(values), 3, dtype=dtype, device=device)
        y = gnsilu.group_norm_silu(x, 1, None, values)
        assert_exact(y, x, 1, None, values)


def test_tail_of_the_silu(device):
    z = [-87.0, -88.0, -90.0, -104.0, -1e5, 88.0, 3e38]
    bias = torch.tensor(z, device=device)
    x = torch.randn(1, len(z), 5, 7, device=device).to(BF16)
    weight = torch.zeros(len(z), device=device)
    y = gnsilu.group_norm_silu(x, 1, weight, bias)
    assert_exact(y, x, 1, weight, bias)
    assert not y.isnan().any() and y[:, :5].signbit().all()
    assert y[0, 1, 0, 0].item() == pytest.approx(-5.3191e-37, rel=2**-8)
    wide = gnsilu.group_norm_silu(x, 1, weight, bias, dtype=FP32)
    assert_exact(wide, x, 1, weight, bias)


def test_an_infinite_bias_gives_what_torch_gives(device):
    bias = torch.tensor([-float("inf"), float("inf")], device=device)
    x = torch.randn(1, 2, 40, device=device).to(BF16)
    y = gnsilu.group_norm_silu(x, 1, torch.zeros(2, device=device), bias)
    want = F.silu(bias).to(BF16).view(1, 2, 1).expand_as(y)
    assert torch.equal(y.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def test_overflow_of_the_result(device):
    x = two_valued((1, 4, 8, 8), -1.0, 1.0, FP16).to(device)
    weight = torch.full((4,), 1e5, device=device)
    y = gnsilu.group_norm_silu(x, 2, weight, eps=0.0)
    assert torch.equal(y, torch.where(x > 0, float("inf"), -0.0).to(FP16))
    assert y[x < 0].signbit().all()
    bf16 = gnsilu.group_norm_silu(x, 2, weight, eps=0.0, dtype=BF16)
    assert (bf16[x > 0] == 99840).all()


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3, 1.0])
def test_eps_is_used_each_time(eps, device):
    x = two_valued((1, 4, 8, 8), -(2.0**-10), 2.0**-10, BF16).to(device)
    z = 2.0**-10 / (2.0**-20 + eps) ** 0.5
    y = gnsilu.group_norm(x, 2, eps=eps, dtype=FP32)
    torch.testing.assert_close(y, torch.sign(x.float()) * z, rtol=1e-6, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 3),
    groups=st.integers(1, 6),
    per_group=st.integers(1, 7),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    half=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, groups, per_group, height, width, half, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    dtype = FP16 if half else BF16
    x = (torch.randn(n, groups * per_group, height, width, device=device) * 3 + 1).to(dtype)
    weight = torch.randn(groups * per_group, device=device)
    assert_exact(gnsilu.group_norm_silu(x, groups, weight), x, groups, weight)


@pytest.mark.parametrize("shape", [(5, 12), (3, 12, 50), (2, 12, 3, 10, 9), (1, 6, 2, 3, 4, 5)])
def test_any_rank(shape, device):
    x = random_x(shape, BF16, device)
    assert_exact(gnsilu.group_norm_silu(x, 3), x, 3)


@pytest.mark.parametrize("shape", [(0, 64, 8, 8), (2, 64, 0, 8), (0, 64, 0, 0), (2, 0, 8, 8)])
def test_empty_inputs_give_empty_results(shape, device):
    x = torch.empty(shape, dtype=BF16, device=device)
    y = gnsilu.group_norm_silu(x, 32, dtype=FP16)
    assert y.shape == shape and y.dtype == FP16
    with pytest.raises(RuntimeError, match="eps"):
        gnsilu.group_norm_silu(x, 32, eps=-1.0)


@pytest.mark.gpu
def test_routes_agree():
    x = random_x((2, 64, 65, 67), BF16, torch.device("cuda"))
    weight, bias = random_affine(64, x.device)
    fused = gnsilu.group_norm_silu(x, 16, weight, bias)
    cpu = gnsilu.group_norm_silu(x.cpu(), 16, weight.cpu(), bias.cpu())
    assert (fused.cpu() != cpu).float().mean() < 1e-4
