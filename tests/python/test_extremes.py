"""Statistics at the ends of 16-bit x: they neither overflow, cancel nor underflow, on any route."""

from __future__ import annotations

import math

import gnsilu
import pytest
import torch
from forms import FUNCTIONS, assert_every_form_exact, assert_plus_and_minus_one, silu_of
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x, two_valued
from reference import assert_exact, same_bits
from torch import Tensor

# Groups of even size: one span of several channels, two spans with odd rows, a few elements.
SHAPES = [((1, 64, 16, 16), 8), ((2, 4, 53, 51), 2), ((1, 4, 3, 3), 2)]


def uniform(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (high - low) * values).to(FP32).to(dtype)


def finite_values(dtype: torch.dtype) -> Tensor:
    """Every finite value of a 16-bit type, ascending, zero once."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].float().unique().to(dtype)


# ------------------------------------------------------------------------------- large values


@pytest.mark.parametrize("scale", [256.0, 5000.0, 60000.0, 65504.0])
def test_case_01_fp16_whose_squares_overflow(scale, routed_device):
    for shape, groups in SHAPES:
        weight, bias = random_affine(shape[1], routed_device)
        for low in (-scale, 0.0, 0.9 * scale):  # here the sums overflow FP16 too
            x = uniform(shape, low, scale, FP16).to(routed_device)
            assert_every_form_exact(x, groups)
            assert_every_form_exact(x, groups, weight, bias, dtypes=[FP16])
        x = two_valued(shape, -scale, scale, FP16).to(routed_device)
        assert_plus_and_minus_one(x, groups, eps=1e-5)


@pytest.mark.parametrize("scale", [1e18, 2e19, 1e30, 3e38, 3.3895e38])
def test_case_02_bf16_whose_variance_overflows_fp32(scale, routed_device):
    for shape, groups in [*SHAPES, ((1, 32, 64, 64), 32)]:
        x = two_valued(shape, -scale, scale, BF16).to(routed_device)
        for eps in (0.0, 1e-6, 1.0):
            assert_plus_and_minus_one(x, groups, eps)
    for shape, groups in SHAPES:
        weight, bias = random_affine(shape[1], routed_device)
        for low in (-scale, 0.3 * scale):  # here the sums overflow FP32 too
            x = uniform(shape, low, scale, BF16).to(routed_device)
            assert_every_form_exact(x, groups, weight, bias)


# ---------------------------------------------------------------------- few values of much weight


def cancelling(x: Tensor) -> Tensor:
    """Vectors of tiny values, of which some begin with 1 and as many with -1."""
    x.fill_(2.0**-26 if x.dtype == BF16 else 2.0**-20)
    vectors = x.view(-1, 2, 32, 8)
    vectors[:, 0, :, 0], vectors[:, 1, :, 0] = 1, -1
    return x


def scattered(x: Tensor) -> Tensor:
    x.copy_(0.001 * torch.randn_like(x, dtype=FP32))
    places = torch.randperm(x.numel(), device=x.device)[: max(2, x.numel() // 256)]
    x.view(-1)[places] = 1000
    x.view(-1)[places[::2]] = -1000
    return x


def heavy_tailed(x: Tensor) -> Tensor:
    return x.copy_(torch.randn_like(x, dtype=FP32) ** 5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [1024, 8192, 2**18, 2**20])
@pytest.mark.parametrize("fill", [cancelling, scattered, heavy_tailed])
def test_case_13_most_of_x_is_close_to_the_mean(fill, size, dtype, routed_device):
    """There a result is as small as x - mean, so that the mean has to be as exact."""
    torch.manual_seed(size)
    x = fill(torch.empty(2, 4, size // 4, dtype=dtype, device=routed_device))
    assert_exact(gnsilu.group_norm_silu(x, 1), x, 1)
    assert_exact(gnsilu.group_norm(x, 1), x, 1, activation=False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [24, 200, 1835, 9001])
@pytest.mark.parametrize("fill", [scattered, heavy_tailed])
def test_case_13_most_of_x_is_close_to_the_mean_in_any_part(
    fill, size, offset, dtype, routed_device
):
    """Whatever a warp's last chunks are: of four vectors, two, one or a single element."""
    torch.manual_seed(size)
    memory = torch.empty(2 * size + offset, dtype=dtype, device=routed_device)
    x = fill(memory[offset:].view(2, 1, size))
    assert_exact(gnsilu.group_norm_silu(x, 1), x, 1)
    assert_exact(gnsilu.group_norm(x, 1), x, 1, activation=False)


# ------------------------------------------------------------- a mean large against the spread


def test_case_03_two_values_side_by_side(routed_device):
    for dtype, low, high in (
        (BF16, 1000.0, 1008.0),
        (FP16, 2048.0, 2050.0),
        (FP16, 60000.0, 60032.0),
    ):
        for shape, groups in SHAPES:
            for sign in (1, -1):
                x = two_valued(shape, sign * low, sign * high, dtype).to(routed_device)
                assert_plus_and_minus_one(x, groups, eps=1e-12)
                assert_every_form_exact(x, groups, eps=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_case_03_every_pair_of_neighbours(dtype, routed_device):
    """A group for each two adjacent finite values, subnormal ones and the largest included."""
    values = finite_values(dtype)
    pairs = torch.stack([values[:-1], values[1:]], -1)
    x = pairs.repeat(1, 9).view(1, -1, 18).to(routed_device)
    assert_plus_and_minus_one(x, x.shape[1], eps=0.0)


@pytest.mark.parametrize("size", [2**20, 2**20 + 3])
@pytest.mark.parametrize(
    ("dtype", "common", "other", "position"),
    [
        (FP16, 60000.0, 60032.0, 0),
        (FP16, 60000.0, 59968.0, -1),
        (FP16, 60000.0, -60000.0, 2**19),
        (BF16, 1000.0, 1008.0, 2**19 + 1),
        (BF16, 1000.0, -3e38, -1),
    ],
)
def test_case_03_one_other_value_among_a_million(
    dtype, common, other, position, size, routed_device
):
    x = torch.full((1, 1, size), common, dtype=dtype, device=routed_device)
    x[0, 0, position] = other
    y = gnsilu.group_norm_silu(x, 1, eps=1e-6)
    assert_exact(y, x, 1, eps=1e-6)
    # In FP32, which tells two passes from one even where that is FP64.
    z = gnsilu.group_norm(x, 1, eps=1e-6, dtype=FP32)
    assert_exact(z, x, 1, eps=1e-6, activation=False)
    assert not y.isnan().any() and not z.isnan().any()


@pytest.mark.parametrize("dtype", HALVES)
def test_case_03_any_mean_against_any_spread(dtype, routed_device):
    noise = random_x((1, 16, 67, 71), FP32, routed_device) - 0.3
    weight, bias = random_affine(16, routed_device)
    for mean in (30.0, 1000.0, -1000.0, 30000.0):
        for deviation in (0.01, 1.0, 50.0):
            x = (noise * (deviation / 2) + mean).to(dtype)
            y = gnsilu.group_norm_silu(x, 4, weight, bias, 1e-6)
            assert_exact(y, x, 4, weight, bias, 1e-6)


# ------------------------------------------------------------------------------------ no spread


BIASES = [0.3, -2.0, 1.0, 0.0]


def assert_silu_of_bias(x: Tensor, num_groups: int, eps: float) -> None:
    """x constant in each group: exactly silu(bias), and exactly 0 without a bias."""
    channels = x.shape[1]
    bias = torch.tensor(BIASES, device=x.device).repeat(-(-channels // 4))[:channels]
    per_channel = (1, channels) + (1,) * (x.dim() - 2)
    y = gnsilu.group_norm_silu(x, num_groups, None, bias, eps)
    assert torch.equal(y, silu_of(bias, x.dtype).view(per_channel).expand_as(y))
    weight = torch.linspace(-3, 3, channels, device=x.device)
    z = gnsilu.group_norm(x, num_groups, weight, bias, eps, FP32)
    assert torch.equal(z, bias.view(per_channel).expand_as(z))
    assert not gnsilu.group_norm_silu(x, num_groups, eps=eps).any()


@pytest.mark.parametrize("size", [1, 3, 49, 147, 1000, 1023, 4096, 2**20 + 1])
def test_case_04_constant_groups_give_silu_of_the_bias(size, routed_device):
    """Whatever the length: a mean that is off by one FP64 unit shows at 1e30 and eps 1e-12."""
    for dtype, values in (
        (FP16, (0.1, 255.5, 65504.0)),
        (BF16, (0.1, 255.5, 1e30, -3.3e38)),
    ):
        for value in values:
            x = torch.full((1, 2, size), value, dtype=dtype, device=routed_device)
            for eps in (1e-6, 1e-12):
                assert_silu_of_bias(x, 2, eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_case_04_a_constant_group_of_every_value(dtype, routed_device):
    values = finite_values(dtype).to(routed_device)
    for size in (3, 49):  # 49 * (1 / 49) is not 1 in FP64
        x = values.view(1, -1, 1).expand(1, -1, size).contiguous()
        for eps in (1e-12, 1e-300):
            assert_silu_of_bias(x, x.shape[1], eps)
    # Several channels a group and several samples.
    x = values[: len(values) // 32 * 32].view(8, -1, 1, 1).expand(-1, -1, 4, 7)
    x = x.reshape(-1, 1, 4, 7).expand(-1, 4, 4, 7).reshape(8, -1, 4, 7)
    assert_silu_of_bias(x, x.shape[1] // 4, 1e-12)


@pytest.mark.parametrize("samples", [1, 3])
def test_case_04_one_element_a_group(samples, routed_device):
    """Also one sample of it, where torch.nn.functional.group_norm raises."""
    x = torch.tensor([3.0, -2.0, 0.5, 60000.0], device=routed_device).repeat(samples, 1)
    for dtype in HALVES:
        for shape in ((samples, 4), (samples, 4, 1, 1)):
            assert_silu_of_bias(x.to(dtype).view(shape), 4, 1e-5)


def test_case_04_eps_zero_on_a_constant_group_is_nan(routed_device):
    for dtype in HALVES:
        for value in (0.0, 0.1, -255.5, 65504.0):
            for size in (1, 3, 147, 9001):
                x = torch.full((1, 4, size), value, dtype=dtype, device=routed_device)
                x[0, 3, 0] = 7.0
                for function in FUNCTIONS.values():
                    y = function(x, 2, eps=0.0)
                    assert y[:, :2].isnan().all() and not y[:, 2:].isnan().any()


# --------------------------------------------------------------------------------- small values


def test_case_05_smallest_fp16_values_are_not_flushed(routed_device):
    x = two_valued((1, 4, 32, 32), -(2.0**-24), 2.0**-24, FP16).to(routed_device)
    y = gnsilu.group_norm_silu(x, 2, eps=1e-6)
    assert torch.equal(y, torch.where(x > 0, 500 * 2.0**-24, -500 * 2.0**-24).to(FP16))
    # eps does not vanish against squares that do in FP16 and FP32.
    z = gnsilu.group_norm(x, 2, eps=1e-12, dtype=FP32)
    want = 2.0**-24 / math.sqrt(2.0**-48 + 1e-12)  # 0.0595; 1 if eps were 0
    torch.testing.assert_close(z, torch.sign(x.float()) * want, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("eps", [1.0, 1e-6, 1e-12, 1e-40, 1e-300, 0.0])
def test_case_05_small_values(eps, routed_device):
    for dtype, scales in (
        (FP16, (2.0**-24, 2.0**-20, 2.0**-14, 1e-3)),
        (BF16, (2.0**-133, 1e-38, 1e-20, 1e-10)),
    ):
        for scale in scales:
            for shape, groups in SHAPES[1:3]:
                x = two_valued(shape, -scale, scale, dtype).to(routed_device)
                assert_every_form_exact(x, groups, eps=eps)
                if eps < 1e-20 * scale * scale:
                    assert_plus_and_minus_one(x, groups, eps)
                x = random_x(shape, FP32, routed_device) * 40 * scale
                assert_every_form_exact(x.to(dtype), groups, eps=eps)


# --------------------------------------------------------------------------- NaN and infinity


BAD_BITS = {
    BF16: [0x7FC0, 0x7F81, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF, 0x7F80, 0xFF80],
    FP16: [0x7E00, 0x7C01, 0x7FFF, 0xFC01, 0xFE00, 0xFFFF, 0x7C00, 0xFC00],
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 16, 16, 16), 4), ((2, 16, 70, 70), 4), ((1, 8, 5, 5), 4), ((2, 6, 1, 5003), 6)],
    ids=str,
)
def test_case_08_a_nan_or_infinity_spoils_its_group_alone(shape, groups, dtype, routed_device):
    """Quiet, signalling, negative, all bits set; at the first, middle and last element."""
    x = random_x(shape, dtype, routed_device)
    weight, bias = random_affine(shape[1], routed_device)
    count = shape[0] * groups
    bad_group = count - 2
    others = [i for i in range(count) if i != bad_group]
    for activation, function in FUNCTIONS.items():
        want = function(x, groups, weight, bias).view(count, -1)
        assert_exact(want.view(shape), x, groups, weight, bias, activation=activation)
        for bits in BAD_BITS[dtype]:
            for position in (0, want.shape[1] // 2, want.shape[1] - 1):
                poisoned = x.clone()
                signed = bits - 0x10000 if bits > 0x7FFF else bits
                poisoned.view(torch.int16).view(count, -1)[bad_group, position] = signed
                y = function(poisoned, groups, weight, bias).view(count, -1)
                assert y[bad_group].isnan().all()
                assert same_bits(y[others], want[others])


def test_case_08_both_infinities_and_every_result_dtype(routed_device):
    x = random_x((1, 8, 65, 33), BF16, routed_device)
    x[0, 2, 3, 3], x[0, 3, 60, 30] = float("inf"), -float("inf")
    for function in FUNCTIONS.values():
        for dtype in (BF16, FP16, FP32):
            y = function(x, 4, dtype=dtype)
            assert y[:, 2:4].isnan().all()
            assert not y[:, :2].isnan().any() and not y[:, 4:].isnan().any()
