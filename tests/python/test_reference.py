"""The reference and the comparer against exact arithmetic (fractions, decimal) on small inputs."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from reference import (
    MIN_SHARE,
    assert_exact,
    compare,
    errors_of,
    errors_of_each,
    group_norm_silu_fp64,
    round_to,
    ulp_of,
)
from torch.nn import functional

SIXTEEN_BIT = [torch.bfloat16, torch.float16]
ALL = [*SIXTEEN_BIT, torch.float32]
# Fraction bits, exponents of the smallest normal and the largest number.
FORMATS = {
    torch.bfloat16: (7, -126, 127),
    torch.float16: (10, -14, 15),
    torch.float32: (23, -126, 127),
}


def every_value(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def same(a, b):
    """Equal bits but for the NaNs', which need only be NaNs."""
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


def exactly_rounded(value, dtype):
    """value, a Fraction, rounded to nearest even by integer arithmetic; a float."""
    fraction_bits, lowest, highest = FORMATS[dtype]
    if value == 0:
        return 0.0
    exponent = lowest
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction_bits)
    rounded = round(value / unit) * unit  # Python rounds a Fraction's ties to even
    if abs(rounded) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, value)
    return float(rounded)


# ----------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_every_16_bit_value_stays(dtype):
    values = every_value(dtype)
    assert same(round_to(values.double(), dtype), values)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_every_tie_goes_to_even_and_its_neighbours_do_not(dtype):
    positive = torch.arange(0, 1 << 15, dtype=torch.int32)
    values = positive.to(torch.int16).view(dtype)
    finite = values.isfinite()
    low = values[finite].double()
    last = 2.0 ** (FORMATS[dtype][2] + 1)  # the tie above the largest number is infinity's
    high = torch.cat([low[1:], torch.tensor([last], dtype=torch.float64)])
    tie = (low + high) / 2
    low_bits = positive[finite]
    even = (low_bits + (low_bits & 1)).to(torch.int16).view(dtype)
    upper = (low_bits + 1).to(torch.int16).view(dtype)
    for sign in (1.0, -1.0):
        assert same(round_to(sign * tie, dtype), sign * even)
        # One FP64 unit beside the tie, where a rounding by way of FP32 sees the tie itself.
        below = torch.nextafter(tie, torch.zeros_like(tie))
        above = torch.nextafter(tie, torch.full_like(tie, torch.inf))
        assert same(round_to(sign * below, dtype), sign * values[finite])
        assert same(round_to(sign * above, dtype), sign * upper)


def test_torch_cast_rounds_twice_and_round_to_does_not():
    just_above_a_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert just_above_a_tie.to(torch.bfloat16).item() == 1.0  # why round_to exists
    assert round_to(just_above_a_tie, torch.bfloat16).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", ALL)
def test_rounding_of_random_bits_equals_exact_arithmetic(dtype):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (500,), generator=generator)
    lowest, highest = FORMATS[dtype][1] - FORMATS[dtype][0] - 2, FORMATS[dtype][2] + 1
    exponents = torch.randint(lowest, highest + 1, (500,), generator=generator)
    bits = (bits & ~(0x7FF << 52)) | ((exponents + 1023) << 52)
    values = bits.view(torch.float64)
    want = [exactly_rounded(Fraction(v), dtype) for v in values.tolist()]
    assert round_to(values, dtype).tolist() == want


@pytest.mark.parametrize("dtype", ALL)
def test_rounding_at_the_ends(dtype):
    fraction_bits, lowest, highest = FORMATS[dtype]
    smallest, past = 2.0 ** (lowest - fraction_bits), 2.0 ** (highest + 1)
    largest = torch.finfo(dtype).max
    tie = (largest + past) / 2
    cases = {
        0.0: 0.0,
        smallest: smallest,
        smallest / 2: 0.0,
        math.nextafter(smallest / 2, 1): smallest,
        smallest * 1.5: 2 * smallest,
        5e-324: 0.0,
        largest: largest,
        math.nextafter(tie, 0): largest,
        tie: math.inf,
        1e300: math.inf,
        math.inf: math.inf,
    }
    for sign in (1.0, -1.0):
        got = round_to(sign * torch.tensor(list(cases), dtype=torch.float64), dtype)
        want = (sign * torch.tensor(list(cases.values()), dtype=torch.float64)).to(torch.float32)
        assert same(got.to(torch.float32), want)
    assert round_to(torch.tensor([math.nan], dtype=torch.float64), dtype).isnan().all()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_ulp_is_the_step_to_the_next_number(dtype):
    positive = torch.arange(0, 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = positive[positive.isfinite()].double()
    assert torch.equal(ulp_of(finite[:-1], dtype), finite[1:] - finite[:-1])
    assert torch.equal(ulp_of(-finite[:-1], dtype), finite[1:] - finite[:-1])


def test_fp64_is_no_output_to_round_to():
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16 or float32"):
        round_to(torch.zeros(1, dtype=torch.float64), torch.float64)


# ------------------------------------------------------------------------------- the function


def exact_results(values, weight, bias, eps, activation):
    """silu((v - mean) / sqrt(var + eps) * weight + bias) of one group, to 50 digits."""
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact) + Fraction(eps)
    with localcontext() as context:
        context.prec = 60
        deviation = (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
        results = []
        for v in exact:
            centred = Decimal((v - mean).numerator) / Decimal((v - mean).denominator)
            z = centred / deviation * Decimal(weight) + Decimal(bias)
            results.append(float(z / (1 + (-z).exp()) if activation else z))
        return results


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("mean", "spread", "eps"),
    [(0, 1, 1e-5), (1000, 4, 1e-5), (0, 2.0**-20, 1e-6), (-30000, 200, 0.0)],
)
def test_reference_equals_exact_arithmetic(dtype, mean, spread, eps, activation):
    generator = torch.Generator().manual_seed(2)
    x = (mean + spread * torch.randn(2, 6, 3, 5, generator=generator)).to(dtype)
    weight = torch.randn(6, generator=generator)
    bias = torch.randn(6, generator=generator)
    got = group_norm_silu_fp64(x, 3, weight, bias, eps, activation)
    assert got.dtype == torch.float64 and got.shape == x.shape
    for sample in range(2):
        for channel in range(6):
            first = channel // 2 * 2
            values = x[sample, first : first + 2].double().flatten().tolist()
            w, b = weight[channel].item(), bias[channel].item()
            want = exact_results(values, w, b, eps, activation)
            want = want[15 * (channel - first) : 15 * (channel - first + 1)]
            tolerance = 1e-13 * (abs(w) * 10 + abs(b))
            assert got[sample, channel].flatten().tolist() == pytest.approx(want, 1e-13, tolerance)


@pytest.mark.parametrize("value", [0.1, 255.5, 65504.0, 1e30, 2.0**-24])
@pytest.mark.parametrize("size", [1, 3, 147, 1000, 1023, 4096])
def test_a_constant_group_is_centred_to_exact_zeros(value, size):
    x = torch.full((1, 2, size), value, dtype=torch.bfloat16)
    bias = torch.tensor([0.0, 1.0])
    got = group_norm_silu_fp64(x, 2, None, bias, 1e-12)
    assert (got[0, 0] == 0).all() and not got[0, 0].signbit().any()
    assert (got[0, 1] == 1 / (1 + math.exp(-1))).all()


def test_published_values_of_two_valued_groups():
    for dtype, low, high in [
        (torch.bfloat16, -0.26953125, 0.73046875),
        (torch.float16, -0.26904296875, 0.73095703125),
    ]:
        x = torch.tensor([1000.0, 1008.0]).repeat(32).view(1, 1, 64).to(dtype)
        y = round_to(group_norm_silu_fp64(x, 1, eps=0.0), dtype)
        assert y[0, 0, :2].tolist() == [low, high]


@pytest.mark.parametrize("z", [-87.0, -88.0, -90.0, -104.0, -700.0])
def test_tail_of_the_silu(z):
    x = torch.randn(1, 1, 8, dtype=torch.float32)
    got = group_norm_silu_fp64(x, 1, torch.zeros(1), torch.full((1,), z))
    with localcontext() as context:
        context.prec = 60
        want = float(Decimal(z) / (1 + (-Decimal(z)).exp()))
    assert got[0, 0, 0].item() == pytest.approx(want, 1e-15)


def test_non_finite_values_and_the_far_tail():
    x = torch.randn(1, 3, 8)
    bias = torch.tensor([-math.inf, math.inf, -1e5])
    got = group_norm_silu_fp64(x, 3, torch.zeros(3), bias)
    assert got[0, 0].isnan().all()  # -inf * 0
    assert (got[0, 1] == math.inf).all()
    assert (got[0, 2] == 0).all() and got[0, 2].signbit().all()
    x[0, 1, 3] = math.inf
    x[0, 2, 0] = math.nan
    got = group_norm_silu_fp64(x, 3)
    assert got[0, 0].isfinite().all() and got[0, 1:].isnan().all()


def test_parameters_are_rounded_to_fp32_unless_x_is_fp64():
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    weight = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    exact = group_norm_silu_fp64(x, 1, weight, activation=False)
    rounded = group_norm_silu_fp64(x.float(), 1, weight, activation=False)
    assert torch.equal(exact, group_norm_silu_fp64(x, 1, activation=False) * weight[:, None])
    plain = group_norm_silu_fp64(x.float(), 1, activation=False)
    assert torch.equal(rounded, plain * weight.float().double()[:, None])


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 2, 3, 2), (2, 4, 0, 3), (0, 4, 2, 2)])
def test_any_rank_and_empty(shape):
    x = torch.randn(shape)
    got = group_norm_silu_fp64(x, 2)
    assert got.shape == x.shape
    if x.numel():
        want = functional.silu(functional.group_norm(x.double(), 2))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert errors_of(round_to(got, torch.float16), x, 2).elements == x.numel()


# ---------------------------------------------------------------------------------- comparing


def test_compare_counts_and_finds_the_worst():
    y64 = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.25, 1e-3]], dtype=torch.float64)
    y = round_to(y64, torch.bfloat16)
    clean = compare(y, y64)
    assert clean.within_bound and clean.share_correct == 1.0 and clean.max_ulp <= 0.5
    y[1, 1] += 3 * 2.0**-9  # three units at 0.25
    found = compare(y, y64)
    assert found.max_ulp == 3.0 and found.worst_index == (1, 1) and not found.within_bound
    assert found.correct == 5 and found.share_correct == pytest.approx(5 / 6)
    # The cancellation of the affine explains it where |w * xhat| + |b| is 2^20 times the error.
    forgiven = compare(y, y64, torch.full_like(y64, 3 * 2.0**-9 * 2.0**20))
    assert forgiven.within_bound and forgiven.max_ulp == 3.0 and forgiven.max_of_bound == 1.0


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 65472.0),
        (math.inf, math.nan),
        (math.inf, -math.inf),
        (65504.0, 65536.0),
        (65504.0, math.inf),
        (0.0, -1e-30),
        (-0.0, 1e-30),
        (0.0, -0.0),
    ],
)
def test_compare_refuses_wrong_specials(got, want):
    y, y64 = torch.tensor([1.0, got]).half(), torch.tensor([1.0, want], dtype=torch.float64)
    found = compare(y, y64)
    assert not found.within_bound and found.correct == 1 and found.worst_index == (1,)
    zabs = torch.tensor([1.0, math.inf], dtype=torch.float64)
    assert not compare(y, y64, zabs).within_bound


@pytest.mark.parametrize(
    ("got", "want", "correct"),
    [
        (math.nan, math.nan, True),
        (math.inf, 70000.0, True),
        (math.inf, math.inf, True),
        (math.inf, 65510.0, False),  # rounds to 65504, and infinity is the next number
        (65504.0, 65530.0, False),
        (-0.0, 0.0, True),
        (-0.0, -1e-30, True),
    ],
)
def test_compare_accepts_what_rounding_explains(got, want, correct):
    y, y64 = torch.tensor([got]).half(), torch.tensor([want], dtype=torch.float64)
    found = compare(y, y64)
    assert found.within_bound and found.correct == correct


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_zero_sign_that_the_error_of_z_explains_does_not_count(sign):
    z = torch.tensor([1.0, -sign * 1e-9], dtype=torch.float64)
    y64, y = z * torch.sigmoid(z), torch.tensor([torch.sigmoid(torch.ones(())), sign * 0.0]).half()
    wide, narrow = torch.tensor([[1.0, 2e-3], [1.0, 5e-4]], dtype=torch.float64)
    explained = compare(y, y64, wide, z)  # 2e-3 * 2^-20 is more than 1e-9
    assert explained.within_bound and explained.wrong_zero_sign == 0
    assert explained.max_of_bound < 1 and explained.correct == 1
    for refused in (compare(y, y64, narrow, z), compare(y, y64, wide), compare(y, y64)):
        assert not refused.within_bound and refused.wrong_zero_sign == 1
        assert refused.max_of_bound == math.inf and refused.worst_index == (1,)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("z", [-150.0, -800.0])
def test_a_positive_zero_in_the_tail_counts(dtype, z):
    x = torch.randn(1, 2, 64, dtype=torch.float32)
    weight, bias = torch.tensor([1.0, 1.0]), torch.tensor([0.0, z])
    y = round_to(group_norm_silu_fp64(x, 2, weight, bias), dtype)
    assert (y[0, 1] == 0).all() and y[0, 1].signbit().all()  # underflown, and z far from 0
    assert errors_of(y, x, 2, weight, bias).within_bound
    y[0, 1, 5] = 0.0
    found = errors_of(y, x, 2, weight, bias)
    assert not found.within_bound and found.wrong_zero_sign == 1
    assert found.worst_index == (0, 1, 5) and found.max_of_bound == math.inf


def test_a_zero_sign_at_a_cancelled_z_does_not_count():
    x = torch.tensor([[[-1.0, 1.0]]]).half()  # xhat is -+1, so z is 2 and a tiny negative number
    bias = torch.tensor([1 - 2.0**-24])
    y64 = group_norm_silu_fp64(x, 1, None, bias, 0.0)
    assert -1e-7 < y64[0, 0, 0] < 0
    y = round_to(y64, torch.float16)
    assert y[0, 0, 0] == 0 and y[0, 0, 0].signbit()
    y[0, 0, 0] = 0.0
    found = errors_of(y, x, 1, None, bias, 0.0)
    assert found.within_bound and found.wrong_zero_sign == 0 and found.max_of_bound < 1


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("shape", [(3, 12, 7, 9), (1, 12, 160, 160), (40, 12, 64, 8)])
def test_assert_exact_over_several_chunks(shape, dtype, activation):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(12, generator=generator)
    bias = torch.randn(12, generator=generator).double()
    y = round_to(group_norm_silu_fp64(x, 4, weight, bias, 1e-6, activation), dtype)
    found = assert_exact(y, x, 4, weight, bias, 1e-6, activation, MIN_SHARE[dtype])
    assert found.elements == found.correct == x.numel()
    worst = (shape[0] - 1, 10, shape[2] - 2, 3)
    y[worst] += 0.5
    with pytest.raises(AssertionError, match=rf"y\[{worst[0]}, 10, {worst[2]}, 3\] is"):
        assert_exact(y, x, 4, weight, bias, 1e-6, activation)


def test_assert_exact_asks_for_the_share_and_the_shape():
    x = torch.randn(1, 4, 50, dtype=torch.float32).to(torch.bfloat16)
    y64 = group_norm_silu_fp64(x, 2)
    y = round_to(y64, torch.bfloat16)
    # Toward the other neighbour: within 1 unit, but not correctly rounded.
    step = torch.where(y.double() <= y64, 1.0, -1.0) * ulp_of(y64, torch.bfloat16)
    y[0, 0, 0] = (y.double() + step)[0, 0, 0].to(torch.bfloat16)
    assert errors_of(y, x, 2).within_bound
    with pytest.raises(AssertionError, match="1 of 200 elements are not correctly rounded"):
        assert_exact(y, x, 2, min_share=MIN_SHARE[torch.bfloat16])
    with pytest.raises(AssertionError, match="must have x's shape"):
        assert_exact(y[..., :-1], x, 2)


def test_errors_of_each_tells_results_apart():
    x = torch.randn(2, 8, 16, 16).to(torch.float16)
    good = round_to(group_norm_silu_fp64(x, 4), torch.float16)
    bad = functional.silu(functional.group_norm(x, 4))
    found = errors_of_each({"good": good, "bad": bad}, x, 4)
    assert found["good"].share_correct == 1.0 and found["bad"].share_correct < 0.99
    assert found["bad"] == errors_of(bad, x, 4)


@pytest.mark.gpu
def test_reference_is_the_same_on_the_gpu():
    x = torch.randn(2, 8, 33, 31).to(torch.bfloat16)
    weight = torch.randn(8)
    on_cpu = group_norm_silu_fp64(x, 4, weight)
    on_gpu = group_norm_silu_fp64(x.cuda(), 4, weight.cuda()).cpu()
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-12, atol=1e-12)
    for dtype in ALL:
        assert torch.equal(round_to(on_cpu.cuda(), dtype).cpu(), round_to(on_cpu, dtype))
        subnormal = torch.linspace(-3, 3, 1001, dtype=torch.float64) * torch.finfo(dtype).tiny
        assert torch.equal(round_to(subnormal.cuda(), dtype).cpu(), round_to(subnormal, dtype))
