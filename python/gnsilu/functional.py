"""The operators as functions."""

from __future__ import annotations

import numbers
import operator
from typing import SupportsFloat, SupportsIndex, cast

import torch
from torch import Tensor

_group_norm_silu = torch.ops.gnsilu.group_norm_silu.default
_group_norm = torch.ops.gnsilu.group_norm.default


def group_norm_silu(
    x: Tensor,
    num_groups: SupportsIndex | SupportsFloat,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """silu(group_norm(x)), computed as exactly as FP64 would and rounded once to ``dtype``.

    With the mean and the biased variance over each (sample, group)::

        z = (x - mean) / sqrt(var + eps) * weight + bias
        y = z * sigmoid(z)

    It takes the place of ``F.silu(F.group_norm(x.float(), num_groups, weight.float(),
    bias.float(), eps)).to(dtype)``; autocast does not change it. (Group normalisation: Wu and He,
    2018. SiLU: Hendrycks and Gimpel, 2016.)

    Args:
        x: ``[N, C, *]``, two dimensions or more, bfloat16, float16, float32 or float64, any
            strides. A contiguous bfloat16 or float16 x on a CUDA device takes the fused kernels,
            everything else PyTorch's operators; :func:`gnsilu.explain` tells which and why.
        num_groups: groups of channels, a divisor of C. Whole numbers of other types (32.0, a numpy
            integer, a 0-d tensor) are taken as such.
        weight: ``[C]``, of any of the four types, any strides, on x's device; None is 1.
        bias: likewise; None is 0.
        eps: added to the variance; finite, 0 or more.
        dtype: of the result: bfloat16, float16 or float32; None is x's.

    Returns:
        A fresh tensor of x's shape, of x's memory format where that is channels_last (or
        channels_last_3d), else contiguous. Differentiable where grad mode is on and an argument
        requires grad.

    Raises:
        TypeError: an argument is of a wrong Python type, or num_groups is not whole.
        ValueError: num_groups is no 64-bit number.
        RuntimeError: a wrong shape, type, device or value; the message names the argument.
        torch.OutOfMemoryError: no memory for the result; nothing is half written.
    """
    return cast(Tensor, _group_norm_silu(x, *_normalised(x, num_groups, weight, bias, eps, dtype)))


def group_norm(
    x: Tensor,
    num_groups: SupportsIndex | SupportsFloat,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """group_norm(x) without an activation: z of :func:`group_norm_silu`, else alike."""
    return cast(Tensor, _group_norm(x, *_normalised(x, num_groups, weight, bias, eps, dtype)))


Normalised = tuple[int, Tensor | None, Tensor | None, float, torch.dtype | None]


def _normalised(
    x: Tensor,
    num_groups: SupportsIndex | SupportsFloat,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: SupportsFloat,
    dtype: torch.dtype | None,
) -> Normalised:
    """The arguments after x in the types of the op's schema."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {_kind(x)}; a tensor is wanted")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not isinstance(parameter, Tensor):
            raise TypeError(f"{name} is {_kind(parameter)}; a tensor or None is wanted")
    num_groups = (
        _int64("num_groups", num_groups)
        if type(num_groups) is int
        else _whole("num_groups", num_groups)
    )
    if type(eps) is not float:
        eps = _real("eps", eps)
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {_kind(dtype)}; a torch.dtype or None is wanted")
        # Left out where it changes nothing: ahead-of-time compiled models (AOTInductor, up to
        # torch 2.11 at least) mishandle an optional type that is given.
        if dtype == x.dtype:
            dtype = None
    return num_groups, weight, bias, eps, dtype


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _whole(name: str, value: SupportsIndex | SupportsFloat) -> int:
    if isinstance(value, float):
        number = value
    elif type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return int(bool(value))  # numpy warns, or raises, where one is an index
    else:
        try:
            return _int64(name, operator.index(value))  # type: ignore[arg-type]
        except (TypeError, RuntimeError):
            number = _real(name, value)
    if not number.is_integer():
        raise TypeError(f"{name} is {number}; a whole number is wanted")
    return _int64(name, int(number))


def _int64(name: str, value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value}; a 64-bit number is wanted")
    return value


def _real(name: str, value: SupportsIndex | SupportsFloat) -> float:
    if isinstance(value, (str, bytes, bytearray)):  # no union: torch.compile of 2.8 knows none
        raise TypeError(f"{name} is the string {value!r}; a number is wanted")
    if isinstance(value, Tensor) and value.is_complex():
        raise TypeError(f"{name} is a complex tensor; a real number is wanted")
    # numpy's: float() would take the real part.
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {_kind(value)}; a real number is wanted")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} is {_kind(value)}; a number is wanted") from None
