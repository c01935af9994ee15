"""The operator as a module."""

from __future__ import annotations

import math

import torch
import torch.fx
from torch import Tensor, nn

from gnsilu.functional import _kind, _real, _whole, group_norm_silu

# torch.fx keeps the call whole, as it does nn.GroupNorm.
torch.fx.wrap("group_norm_silu")


class GroupNormSiLU(nn.Module):
    """``nn.GroupNorm`` followed by ``nn.SiLU``, by :func:`gnsilu.group_norm_silu`.

    Parameters are named as nn.GroupNorm's, so that a state_dict loads either way.

    Args:
        num_groups: groups of channels, a divisor of num_channels.
        num_channels: C of the input ``[N, C, *]``.
        eps: added to the variance.
        affine: whether there are a weight (ones at first) and a bias (zeros), ``[C]`` each.
        dtype: of the result: bfloat16, float16 or float32; None is the input's. (The parameters'
            type is theirs alone: change it with ``to()``.)
        device: of the parameters.

    Raises:
        ValueError: num_groups does not divide num_channels, eps is negative or not finite, or dtype
            is none that a result can have.
    """

    __constants__ = ("num_groups", "num_channels", "eps", "affine")

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_groups, num_channels = (
            _whole("num_groups", num_groups),
            _whole("num_channels", num_channels),
        )
        if num_groups < 1 or num_channels < 0 or num_channels % num_groups != 0:
            raise ValueError(
                f"num_groups is {num_groups}, num_channels {num_channels}; a divisor of the "
                "number of channels is wanted"
            )
        eps = _real("eps", eps)
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps is {eps}; a finite number, 0 or more, is wanted")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {_kind(dtype)}; a torch.dtype or None is wanted")
        if dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise ValueError(f"dtype is {dtype}; bfloat16, float16 or float32 is wanted")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self.dtype = dtype
        ones = torch.ones(num_channels, device=device) if affine else None
        zeros = torch.zeros(num_channels, device=device) if affine else None
        self.weight = nn.Parameter(ones) if ones is not None else None
        self.bias = nn.Parameter(zeros) if zeros is not None else None

    def reset_parameters(self) -> None:
        """Weight to ones, bias to zeros."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[N, num_channels, *]``; the result has its shape."""
        if torch.jit.is_scripting():  # scripted code knows the op, not the Python function
            y: Tensor = torch.ops.gnsilu.group_norm_silu(
                x, self.num_groups, self.weight, self.bias, self.eps, self.dtype
            )
            return y
        return group_norm_silu(x, self.num_groups, self.weight, self.bias, self.eps, self.dtype)

    def extra_repr(self) -> str:
        dtype = f", dtype={self.dtype}" if self.dtype else ""
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}{dtype}"
        )
