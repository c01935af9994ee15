"""Every mixture of types: of x, parameters and result, in autocast and beside any default."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager

import gnsilu
import pytest
import torch
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x, two_valued
from processes import output_of
from reference import assert_exact
from torch import Tensor, nn

PARAMETER_DTYPES = [None, BF16, FP16, FP32, torch.float64]
AUTOCASTS = [None, BF16, FP16]
# Correctly rounded elements at least: BF16 by way of FP16 would misround every sixteenth.
ONCE = 0.999


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype or BF16, enabled=dtype is not None):
        yield


def as_dtype(values: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else values.to(dtype)


# --- what is read and what is written -----------------------------------------------------------


@pytest.mark.parametrize("autocast_dtype", AUTOCASTS)
@pytest.mark.parametrize("x_dtype", HALVES)
def test_case_29_parameters_of_every_dtype(x_dtype, autocast_dtype, routed_device):
    x = random_x((2, 24, 11, 11), x_dtype, routed_device)
    # FP64 values that are no FP32 ones, so that reading them by another type shows.
    weight, bias = (p.double() * (1 + 2.0**-30) for p in random_affine(24, routed_device))
    for weight_dtype, bias_dtype in itertools.product(PARAMETER_DTYPES, repeat=2):
        w, b = as_dtype(weight, weight_dtype), as_dtype(bias, bias_dtype)
        with autocast(routed_device, autocast_dtype):
            y = gnsilu.group_norm_silu(x, 4, w, b)
        assert y.dtype == x_dtype
        assert_exact(y, x, 4, w, b)


@pytest.mark.parametrize("autocast_dtype", AUTOCASTS)
@pytest.mark.parametrize("x_dtype", HALVES)
@pytest.mark.parametrize("shape", [(2, 64, 31, 33), (1, 16, 80, 80)], ids=str)
def test_case_30_every_result_dtype(shape, x_dtype, autocast_dtype, routed_device):
    x = random_x(shape, x_dtype, routed_device)
    weight, bias = random_affine(shape[1], routed_device)
    for y_dtype in (None, BF16, FP16, FP32):
        with autocast(routed_device, autocast_dtype):
            y = gnsilu.group_norm_silu(x, 8, weight, bias, 1e-5, y_dtype)
        assert y.dtype == (y_dtype or x_dtype)
        assert_exact(y, x, 8, weight, bias, min_share=None if y_dtype == FP32 else ONCE)


@pytest.mark.parametrize("autocast_dtype", AUTOCASTS)
def test_case_30_result_dtype_of_differentiable_calls(autocast_dtype, device):
    for x_dtype, y_dtype in itertools.product((*HALVES, FP32), (None, BF16, FP16, FP32)):
        x = random_x((2, 8, 5, 5), x_dtype, device).requires_grad_()
        want = gnsilu.group_norm_silu(x, 4, dtype=y_dtype)
        with autocast(device, autocast_dtype):
            y = gnsilu.group_norm_silu(x, 4, dtype=y_dtype)
        assert want.dtype == y.dtype == (y_dtype or x_dtype)
        assert torch.equal(y, want)


def test_case_30_overflow_of_the_result(routed_device):
    """What BF16 holds and FP16 does not, from both types of x."""
    weight = torch.full((4,), 65504.0, device=routed_device)
    bias = torch.tensor([0.0, 15.0, 17.0, 1e5], device=routed_device)
    for dtype in HALVES:
        x = two_valued((1, 4, 9, 16), -1.0, 1.0, dtype).to(routed_device)
        for y_dtype in (BF16, FP16, FP32):
            y = gnsilu.group_norm_silu(x, 2, weight, bias, 0.0, y_dtype)
            assert_exact(y, x, 2, weight, bias, 0.0)
            # From 65504 + 16 on FP16 rounds to infinity.
            upper = y[x > 0].view(4, -1)
            assert upper.isinf().all(-1).tolist() == [
                False,
                False,
                y_dtype == FP16,
                y_dtype == FP16,
            ]


def test_case_30_there_and_back(routed_device):
    """BF16 to FP16 and back to BF16: two calls, each rounded once."""
    x = random_x((2, 16, 40, 33), BF16, routed_device)
    there = gnsilu.group_norm_silu(x, 4, dtype=FP16)
    back = gnsilu.group_norm_silu(there, 4, dtype=BF16)
    assert_exact(there, x, 4, min_share=ONCE)
    assert_exact(back, there, 4, min_share=ONCE)


# --- defaults of the process --------------------------------------------------------------------


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        yield
        assert torch.get_default_dtype() == dtype
        assert torch.get_default_device().type == device
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


DEFAULT_DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("default_device", DEFAULT_DEVICES)
@pytest.mark.parametrize("default_dtype", [BF16, FP16, torch.float64])
def test_case_31_defaults_do_not_enter(default_dtype, default_device, device, monkeypatch):
    x = random_x((2, 8, 5, 5), BF16, device)
    wide = torch.randn(2, 8, 5, 5, device=device)
    weight, bias = random_affine(8, device)
    for route in ("auto", "fallback"):
        monkeypatch.setenv("GNSILU_ROUTE", route)
        for inputs in (x, wide, x.clone().requires_grad_()):
            want = gnsilu.group_norm_silu(inputs, 4, weight, bias)
            with defaults(default_dtype, default_device):
                y = gnsilu.group_norm_silu(inputs, 4, weight, bias)
            assert y.device == want.device and y.dtype == want.dtype
            assert torch.equal(y, want)


TUNED_BESIDE_OTHER_DEFAULTS = """
import os, torch, gnsilu
x = torch.randn(1, 46, 620, 621, device="cuda").to(torch.bfloat16)  # large enough to be tuned
os.environ["GNSILU_TUNE"] = "0"
want = gnsilu.group_norm_silu(x, 2)
del os.environ["GNSILU_TUNE"]
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
assert torch.equal(gnsilu.group_norm_silu(x, 2), want)
assert torch.get_default_dtype() == torch.bfloat16
assert torch.get_default_device().type == "meta"
"""


@pytest.mark.gpu
def test_case_31_defaults_do_not_enter_while_tuning(tmp_path):
    output_of(TUNED_BESIDE_OTHER_DEFAULTS, GNSILU_CACHE_DIR=str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text("utf-8"))["entries"]) == 1  # it was tuned


# --- parameters left out ------------------------------------------------------------------------


class Norm(nn.Module):
    """A call with or without each parameter, in code that TorchScript knows too."""

    def __init__(self, with_weight: bool, with_bias: bool) -> None:
        super().__init__()
        weight, bias = random_affine(8, torch.device("cpu"))
        self.weight = nn.Parameter(weight) if with_weight else None
        self.bias = nn.Parameter(bias) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.gnsilu.group_norm_silu(x, 4, self.weight, self.bias)


MODES = {
    "eager": lambda module, x: module,
    "functional": lambda module, x: (
        lambda x: gnsilu.group_norm_silu(x, 4, module.weight, module.bias)
    ),
    "script": lambda module, x: torch.jit.script(module),
    "trace": lambda module, x: torch.jit.trace(module, x),
    "compile": lambda module, x: torch.compile(module, fullgraph=True, backend="aot_eager"),
    "export": lambda module, x: torch.export.export(module, (x,)).module(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("with_weight", "with_bias"), [(w, b) for w in (False, True) for b in (False, True)]
)
def test_case_33_parameters_left_out(with_weight, with_bias, mode, device):
    torch._dynamo.reset()
    module = Norm(with_weight, with_bias).to(device).eval()
    x = random_x((2, 8, 9, 7), BF16, device)
    with torch.no_grad():
        y = MODES[mode](module, x)(x)
    assert_exact(y, x, 4, module.weight, module.bias)
