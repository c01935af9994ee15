"""The reference that every test measures against, and the comparer: units in the last place.

FP64, in pure torch, on any device: two-pass mean and biased variance over each (sample, group),
affine, z * sigmoid(z), then one rounding to the output's dtype. Nothing here uses gnsilu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Share of correctly rounded elements that ordinary activations reach at least.
MIN_SHARE = {torch.bfloat16: 0.9999, torch.float16: 0.999}

# Relative error of the affine before its cancellation, |w * xhat| + |b|, that is allowed.
AFFINE_TOLERANCE = 2.0**-20

# Elements that are held in FP64 at a time, where a group is not larger by itself: about what a
# processor's cache holds, and on a GPU what hides the launches.
_CHUNK_ELEMENTS_CPU = 1 << 17
_CHUNK_ELEMENTS_GPU = 1 << 24


@dataclass(frozen=True)
class _Format:
    fraction_bits: int
    min_exponent: int  # of the smallest normal number
    max_exponent: int  # of the largest finite number

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.fraction_bits) * 2.0**self.max_exponent

    @property
    def overflow(self) -> float:
        """The first value past the range, at which an infinity counts as standing."""
        return 2.0 ** (self.max_exponent + 1)


_FORMATS = {
    torch.bfloat16: _Format(7, -126, 127),
    torch.float16: _Format(10, -14, 15),
    torch.float32: _Format(23, -126, 127),
}


def _format_of(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    return _FORMATS[dtype]


# ------------------------------------------------------------------------------- the function


def _normalise(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """z and |w * xhat| + |b|, both FP64 of x's shape."""
    n, c = x.shape[:2]
    x64 = x.detach().to(torch.float64).reshape(n, num_groups, -1)
    centred = x64 - x64.mean(-1, keepdim=True)
    # The mean of 16-bit numbers has more bits than FP64: what its rounding left is taken off too,
    # so that a constant group is centred to exact zeros.
    centred -= centred.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    scaled = centred.div_((variance + eps).sqrt_()).reshape(x.shape)
    per_channel = (1, c) + (1,) * (x.dim() - 2)

    def parameter(values: Tensor) -> Tensor:
        # An FP64 weight or bias is rounded to FP32 where x is not FP64 itself.
        values = values.detach()
        values = values if x.dtype == torch.float64 else values.to(torch.float32)
        return values.to(torch.float64).reshape(per_channel)

    if weight is not None:
        scaled = scaled * parameter(weight)
    shift = x64.new_zeros(per_channel) if bias is None else parameter(bias)
    # Adding +0 makes every zero of z positive: -0 then always stands for an underflow.
    return (scaled + shift) + 0.0, scaled.abs_() + shift.abs()


def _silu(z: Tensor) -> Tensor:
    """z * sigmoid(z) without overflow of the exponential; -inf gives NaN (-inf * 0)."""
    decay = z.abs().neg_().exp_()  # e^-|z|
    sigmoid = torch.where(z >= 0, torch.ones_like(z), decay).div_(decay.add_(1.0))
    return sigmoid.mul_(z)


@torch.no_grad()
def group_norm_silu_fp64(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: bool = True,
) -> Tensor:
    """The unrounded result, FP64 of x's shape [N, C, *]; with activation=False the z of it."""
    if x.numel() == 0:
        return x.to(torch.float64)
    z, _ = _normalise(x, num_groups, weight, bias, eps)
    return _silu(z) if activation else z


# ----------------------------------------------------------------------------------- rounding


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exact; int64 between -1022 and 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _ulp_exponent(values: Tensor, fmt: _Format) -> Tensor:
    biased = (values.contiguous().view(torch.int64) >> 52) & 0x7FF
    return (biased - 1023).clamp_(fmt.min_exponent, fmt.max_exponent) - fmt.fraction_bits


@torch.no_grad()
def ulp_of(y64: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64: the distance of dtype's numbers at |y64|, for subnormals that of the subnormals."""
    return _power_of_two(_ulp_exponent(y64, _format_of(dtype)))


@torch.no_grad()
def round_to(y64: Tensor, dtype: torch.dtype) -> Tensor:
    """y64 rounded once to dtype, to nearest, ties to even; past the range to infinity.

    torch's cast from FP64 to BF16 or FP16 goes through FP32 and rounds twice, so the value is
    first brought onto dtype's grid in FP64; the casts after that are exact.
    """
    fmt = _format_of(dtype)
    exponent = _ulp_exponent(y64, fmt)
    on_grid = (y64 * _power_of_two(-exponent)).round_().mul_(_power_of_two(exponent))
    overflown = on_grid.abs() > fmt.largest
    on_grid = torch.where(overflown, on_grid.sign() * torch.inf, on_grid)
    as_float = on_grid.to(torch.float32)
    if dtype != torch.bfloat16:
        return as_float.to(dtype)
    # By bits: some processors' conversion instructions flush BF16's subnormals.
    return (as_float.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


# ---------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Comparison:
    """How far y is from its unrounded values."""

    elements: int
    correct: int  # equal to the correctly rounded value, NaN to NaN
    max_ulp: float  # largest |y - y64| in units in the last place of y's dtype
    max_of_bound: float  # largest |y - y64| as a share of what is allowed
    worst_index: tuple[int, ...]  # where that is
    mismatched_nonfinite: int  # NaN or infinity on one side only
    wrong_zero_sign: int  # +0 where a negative value underflows, or the reverse, past z's error

    @property
    def share_correct(self) -> float:
        return self.correct / self.elements if self.elements else 1.0

    @property
    def misrounded_per_million(self) -> float:
        return 1e6 * (1 - self.share_correct)

    @property
    def within_bound(self) -> bool:
        return not (self.mismatched_nonfinite or self.wrong_zero_sign) and self.max_of_bound <= 1

    def merged(self, other: Comparison) -> Comparison:
        worst = self if self.max_of_bound >= other.max_of_bound else other
        return Comparison(
            elements=self.elements + other.elements,
            correct=self.correct + other.correct,
            max_ulp=max(self.max_ulp, other.max_ulp),
            max_of_bound=worst.max_of_bound,
            worst_index=worst.worst_index if worst.elements else other.worst_index,
            mismatched_nonfinite=self.mismatched_nonfinite + other.mismatched_nonfinite,
            wrong_zero_sign=self.wrong_zero_sign + other.wrong_zero_sign,
        )


_NOTHING = Comparison(0, 0, 0.0, 0.0, (), 0, 0)


@torch.no_grad()
def compare(
    y: Tensor, y64: Tensor, zabs: Tensor | None = None, z: Tensor | None = None
) -> Comparison:
    """Compares y (BF16, FP16 or FP32) with its unrounded values y64 of the same shape.

    Allowed is 1 unit in the last place or, with zabs = |w * xhat| + |b|, 2^-20 of zabs where that
    is more. A wrong NaN, infinity or zero's sign is counted, whatever the distance; an infinity
    counts as the first number past the range, so one that rounding alone explains is within 1.
    With z too, the sign of a zero counts only where |z| is more than 2^-20 of zabs: nearer to 0
    the allowed error of z turns it. y64 cannot tell, in SiLU's tail it underflows at a large z.
    """
    if y.shape != y64.shape:
        raise ValueError(f"shapes differ: y {tuple(y.shape)}, y64 {tuple(y64.shape)}")
    if y.numel() == 0:
        return _NOTHING
    fmt = _format_of(y.dtype)
    rounded = round_to(y64, y.dtype)
    wrong_sign = (y == 0) & (rounded == 0) & (y.signbit() != rounded.signbit())
    wrong_sign &= (y64 != 0) | y64.signbit()  # the sign of a zero that z itself is does not count
    correct = ((y == rounded) & ~wrong_sign) | (y.isnan() & rounded.isnan())
    # Where zabs is not finite there is no finite value to be far from.
    tolerance = torch.zeros_like(y64) if zabs is None else zabs * AFFINE_TOLERANCE
    tolerance = tolerance.nan_to_num_(nan=0.0, posinf=0.0)
    if z is not None:
        wrong_sign &= z.abs() > tolerance

    mismatched = y.isnan() != y64.isnan()
    mismatched |= y.isinf() & (y64.abs() < fmt.largest)
    mismatched |= y.isfinite() & (y64.abs() >= fmt.overflow)

    got = y.to(torch.float64).clamp_(-fmt.overflow, fmt.overflow)
    error = got.sub_(y64.clamp(-fmt.overflow, fmt.overflow)).abs_()
    allowed = ulp_of(y64, y.dtype)
    in_ulp = (error / allowed).nan_to_num_(nan=0.0)
    of_bound = (error / allowed.maximum(tolerance)).nan_to_num_(nan=0.0)
    of_bound[mismatched | wrong_sign] = torch.inf
    worst = int(of_bound.argmax())
    return Comparison(
        elements=y.numel(),
        correct=int(correct.sum()),
        max_ulp=float(in_ulp.max()),
        max_of_bound=float(of_bound.reshape(-1)[worst]),
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), y.shape)),
        mismatched_nonfinite=int(mismatched.sum()),
        wrong_zero_sign=int(wrong_sign.sum()),
    )


def _chunks(x: Tensor, num_groups: int) -> Iterator[tuple[slice, slice]]:
    """Samples and channels of whole groups, about as many elements each as the chunk size."""
    n, c = x.shape[:2]
    channels_per_group = c // num_groups
    group_size = channels_per_group * (x.numel() // (n * c))
    elements = _CHUNK_ELEMENTS_CPU if x.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    groups = max(1, min(num_groups, elements // group_size))
    samples = max(1, elements // (group_size * num_groups))
    for first_sample in range(0, n, samples):
        for first in range(0, num_groups, groups):
            last = min(first + groups, num_groups)
            yield (
                slice(first_sample, min(first_sample + samples, n)),
                slice(first * channels_per_group, last * channels_per_group),
            )


@torch.no_grad()
def errors_of_each(
    results: dict[str, Tensor],
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: bool = True,
) -> dict[str, Comparison]:
    """Compares several implementations' results with one reference, some groups at a time."""
    for name, y in results.items():
        if y.shape != x.shape:
            raise AssertionError(f"{name} must have x's shape {tuple(x.shape)}, got {y.shape}")
    totals = dict.fromkeys(results, _NOTHING)
    if x.numel() == 0:
        return totals
    channels_per_group = x.shape[1] // num_groups
    for samples, channels in _chunks(x, num_groups):
        z, zabs = _normalise(
            x[samples, channels],
            (channels.stop - channels.start) // channels_per_group,
            None if weight is None else weight[channels],
            None if bias is None else bias[channels],
            eps,
        )
        y64 = _silu(z) if activation else z
        for name, y in results.items():
            part = compare(y[samples, channels], y64, zabs, z)
            n, c, *rest = part.worst_index
            index = (n + samples.start, c + channels.start, *rest)
            totals[name] = totals[name].merged(replace(part, worst_index=index))
    return totals


def errors_of(
    y: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: bool = True,
) -> Comparison:
    """Compares y, the result of any implementation for these arguments, with the reference."""
    return errors_of_each({"y": y}, x, num_groups, weight, bias, eps, activation)["y"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also for NaNs and zeros; both contiguous."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.view(torch.uint8), b.view(torch.uint8)
    )


def assert_exact(
    y: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: bool = True,
    min_share: float | None = None,
) -> Comparison:
    """Asserts the promised exactness of y, the result for these arguments; y's dtype is free.

    Every element within max(1 unit in the last place, 2^-20 * (|w * xhat| + |b|)) of its unrounded
    value, NaN and infinity in the same places, a share of at least min_share (MIN_SHARE[y.dtype]
    for ordinary activations) correctly rounded.
    """
    found = errors_of(y, x, num_groups, weight, bias, eps, activation)
    if not found.within_bound:
        at = found.worst_index
        sample = slice(at[0], at[0] + 1)
        y64 = group_norm_silu_fp64(x[sample], num_groups, weight, bias, eps, activation)
        y64 = y64[(slice(0, 1), *(slice(i, i + 1) for i in at[1:]))]
        raise AssertionError(
            f"y{list(at)} is {y[at].item()!r}, want {round_to(y64, y.dtype).item()!r}"
            f" (unrounded {y64.item()!r}, x {x[at].item()!r}); {found.max_of_bound:.4g} times the"
            f" allowed error; over all {found.elements} elements: {found.max_ulp:.4g} units in the"
            f" last place of {y.dtype}, {found.mismatched_nonfinite} wrongly (not) finite,"
            f" {found.wrong_zero_sign} zeros of the wrong sign"
        )
    if min_share is not None and found.share_correct < min_share:
        raise AssertionError(
            f"{found.elements - found.correct} of {found.elements} elements are not correctly"
            f" rounded to {y.dtype}: a share of {found.share_correct:.6f}, wanted {min_share}"
        )
    return found


def pytorch_fp32(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    activation: bool = True,
) -> Tensor:
    """What PyTorch computes under autocast: group norm and SiLU in FP32, one rounding."""
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    z = torch.group_norm(x.float(), num_groups, weight, bias, eps)
    return (torch.nn.functional.silu(z) if activation else z).to(dtype or x.dtype)
