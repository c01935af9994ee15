"""What is compared, and on which shapes: gnsilu's routes and PyTorch's ways, as functions of x,
weight and bias."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import gnsilu
import torch
from gnsilu.bench import EPS, GROUPS, autocast
from gnsilu.timing import Variant
from torch import Tensor

Shape = tuple[int, ...]

SMALLEST: Shape = (2, 1280, 8, 8)
LARGE: Shape = (1, 256, 1024, 1024)
# The shapes that speed is judged at (N, C, H, W): of image models, from a bottleneck to 16 MP.
SHAPES: list[Shape] = [
    SMALLEST,
    (2, 320, 64, 64),
    (1, 1280, 64, 64),
    (1, 512, 64, 64),
    (1, 512, 128, 128),
    (1, 512, 256, 256),
    (1, 256, 512, 512),
    (1, 128, 1024, 1024),
    LARGE,
    (1, 128, 2048, 2048),
    (4, 128, 512, 512),
]
# Odd sizes, sizes between, groups at the edge of what a GPU holds, and one of a video.
MORE_SHAPES: list[Shape] = [
    (1, 512, 33, 33),
    (1, 512, 96, 160),
    (4, 512, 64, 64),
    (1, 256, 256, 256),
    (1, 128, 1000, 1000),
    (1, 128, 9, 256, 256),
    (1, 256, 720, 1280),
    (1, 128, 1536, 1536),
]
# Those that FP16 is measured at too.
FP16_SHAPES: list[Shape] = [
    SMALLEST,
    (1, 512, 33, 33),
    (1, 512, 128, 128),
    (1, 256, 512, 512),
    LARGE,
]
ROUTES = ("ring", "resident", "two_pass", "three_pass", "fallback")

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def bytes_of(shape: Shape) -> int:
    """Of a 16-bit activation."""
    return 2 * math.prod(shape)


def group_bytes_of(shape: Shape) -> int:
    return bytes_of(shape) // (shape[0] * GROUPS)


# ------------------------------------------------------------------------------------- gnsilu


@contextmanager
def route(name: str) -> Iterator[None]:
    before = os.environ.get("GNSILU_ROUTE")
    os.environ["GNSILU_ROUTE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["GNSILU_ROUTE"]
        else:
            os.environ["GNSILU_ROUTE"] = before


def default(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By the route that the call takes by itself."""
    return gnsilu.group_norm_silu(x, GROUPS, weight, bias, EPS)


def _through(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with route(name):
        return default(x, weight, bias)


def through(name: str) -> Contender:
    """gnsilu by that route."""
    return partial(_through, name)


def why_not_through(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Why that route cannot serve the call; None where it can."""
    with route(name):
        try:
            gnsilu.explain(x, GROUPS, weight, bias, EPS)
        except RuntimeError as error:
            _, found, reason = str(error).splitlines()[0].partition(" is not possible: ")
            if not found:
                raise
            return reason
    return None


# ------------------------------------------------------------------------------------ PyTorch


def compile_afresh() -> Contender:
    """autocast by torch.compile, for static shapes and with nothing compiled before.

    Dynamo gives up on a function after a handful of shapes.
    """
    torch.compiler.reset()
    return torch.compile(autocast, fullgraph=True, dynamic=False)


def why_not_compiled(compiled: Contender, x: Tensor) -> str | None:
    """Why torch.compile does not work on this machine; None where it does."""
    parameter = torch.ones(x.shape[1], device=x.device)
    try:
        compiled(x, parameter, parameter)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many types: no compiler, no Python headers, no Triton
        message = str(error).strip() or type(error).__name__
        return message.splitlines()[0]
    return None


# --------------------------------------------------------------------------------------- call


@dataclass(frozen=True)
class Case:
    """The arguments of a call: x and the seeded parameters of its channels."""

    x: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Case:
        generator = torch.Generator(x.device).manual_seed(7)
        weight, bias = torch.randn(2, x.shape[1], device=x.device, generator=generator)
        return cls(x, weight, bias)

    def bound(self, contender: Contender, dtype: torch.dtype = torch.float32) -> Variant:
        """A function of x alone, with these parameters in dtype."""
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return lambda x: contender(x, weight, bias)
