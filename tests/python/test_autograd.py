"""Gradients: never a silent detach, right by FP64 autograd, no tangent lost."""

from __future__ import annotations

import contextlib
import itertools

import gnsilu
import pytest
import torch
import torch.nn.functional as F
from inputs import BF16, FP16, FP32, random_affine, random_x
from reference import assert_exact, ulp_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

FP64 = torch.float64
# Which of x, weight and bias require grad: every choice but none.
REQUIRING = [which for which in itertools.product((True, False), repeat=3) if any(which)]


def inputs(device, dtype=FP64):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 2, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(6, device=device, dtype=dtype, requires_grad=True)
    return x, weight, bias


@pytest.mark.parametrize("function", [gnsilu.group_norm_silu, gnsilu.group_norm])
def test_case_32_gradcheck(function, device):
    def call(x, weight, bias):
        return function(x, 3, weight, bias, 1e-4)

    assert gradcheck(call, inputs(device), check_forward_ad=True)
    assert gradgradcheck(call, inputs(device))
    for which in REQUIRING:
        some = [t.detach().requires_grad_(r) for t, r in zip(inputs(device), which, strict=True)]
        assert gradcheck(call, some, fast_mode=True)


def gradients(arguments: list[Tensor], upstream: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [t for t in arguments if t.requires_grad], upstream)


@pytest.mark.parametrize("parameter_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("x_dtype", [BF16, FP16, FP32])
def test_case_32_gradients_equal_those_of_fp64(x_dtype, parameter_dtype, device):
    """Rounded to their own type, but for the errors of sums of FP32 products."""
    x = random_x((2, 24, 9, 7), x_dtype, device)
    weight, bias = (p.to(parameter_dtype) for p in random_affine(24, device))
    for which in REQUIRING:
        arguments = [
            t.clone().requires_grad_(r) for t, r in zip((x, weight, bias), which, strict=True)
        ]
        y = gnsilu.group_norm_silu(arguments[0], 3, arguments[1], arguments[2])
        assert y.dtype == x_dtype and y.requires_grad
        assert_exact(y.detach(), x, 3, weight, bias)
        upstream = random_x(tuple(x.shape), x_dtype, device)
        got = gradients(arguments, upstream, y)

        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in arguments]
        z = F.silu(F.group_norm(exact[0], 3, exact[1], exact[2]))
        for g, w in zip(got, gradients(exact, upstream.double(), z), strict=True):
            allowed = ulp_of(w, g.dtype).maximum(2.0**-18 * w.abs().max())
            assert ((g.double() - w).abs() <= allowed).all()


MODES = {
    "grad": (),
    "no_grad": (torch.no_grad(),),
    "inference_mode": (torch.inference_mode(),),
    "no_grad, enable_grad": (torch.no_grad(), torch.enable_grad()),
    "no_grad, enable_grad, no_grad": (torch.no_grad(), torch.enable_grad(), torch.no_grad()),
    "no_grad, inference_mode": (torch.no_grad(), torch.inference_mode()),
    "inference_mode, enable_grad": (torch.inference_mode(), torch.enable_grad()),
    "inference_mode, off": (torch.inference_mode(), torch.inference_mode(False)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [*REQUIRING, (False, False, False)], ids=str)
def test_case_32_modes(which, mode, device):
    """A graph where PyTorch's own operators make one, and the right values in any case."""
    x = random_x((2, 16, 9, 9), BF16, device).requires_grad_(which[0])
    weight, bias = (
        p.requires_grad_(r) for p, r in zip(random_affine(16, device), which[1:], strict=True)
    )
    with contextlib.ExitStack() as stack:
        for context in MODES[mode]:
            stack.enter_context(context)
        y = gnsilu.group_norm_silu(x, 4, weight, bias)
        torchs = F.silu(F.group_norm(x.float(), 4, weight, bias))
        reason = gnsilu.explain(x, 4, weight, bias).reason
    assert y.requires_grad == torchs.requires_grad
    assert y.is_inference() == torchs.is_inference()
    if mode != "inference_mode, enable_grad":  # see the test below
        assert (reason == "a gradient is needed") == y.requires_grad
    assert_exact(y.detach(), x, 4, weight, bias)


def test_explain_knows_that_inference_mode_needs_no_gradient(device):
    x = random_x((2, 16, 9, 9), BF16, device).requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        assert not gnsilu.group_norm_silu(x, 4).requires_grad
        assert gnsilu.explain(x, 4).reason != "a gradient is needed"


def test_case_32_backward_after_a_call_in_inference_mode(device):
    x = random_x((2, 16, 9, 9), BF16, device).requires_grad_()
    with torch.inference_mode():
        gnsilu.group_norm_silu(x, 4)
    gnsilu.group_norm_silu(x, 4).float().square().sum().backward()
    assert x.grad is not None and x.grad.any()


@pytest.mark.parametrize("where", [0, 1, 2])
def test_forward_mode_tangents(where, device):
    arguments = [t.detach() for t in inputs(device)]
    tangent = torch.randn_like(arguments[where])
    step = 1e-6
    shifted = []
    for sign in (1, -1):
        moved = list(arguments)
        moved[where] = arguments[where] + sign * step * tangent
        shifted.append(gnsilu.group_norm_silu(moved[0], 3, moved[1], moved[2]))
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode), dual_level():
            dual = list(arguments)
            dual[where] = make_dual(arguments[where], tangent)
            got = unpack_dual(gnsilu.group_norm_silu(dual[0], 3, dual[1], dual[2])).tangent
        assert got is not None
        want = (shifted[0] - shifted[1]) / (2 * step)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_vmap_and_functional_transforms(device):
    x = torch.randn(3, 2, 6, 5, device=device)
    y = torch.vmap(lambda t: gnsilu.group_norm_silu(t, 3))(x)
    want = torch.stack([gnsilu.group_norm_silu(t, 3) for t in x])
    torch.testing.assert_close(y, want)
    weights = torch.randn(3, 6, device=device)
    y = torch.vmap(lambda w: gnsilu.group_norm_silu(x[0], 3, w))(weights)
    torch.testing.assert_close(y[2], gnsilu.group_norm_silu(x[0], 3, weights[2]))
    grad = torch.func.grad(lambda t: gnsilu.group_norm_silu(t, 3).square().sum())(x[0])
    leaf = x[0].clone().requires_grad_()
    gnsilu.group_norm_silu(leaf, 3).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_vmap_is_as_exact_as_a_plain_call(scale, device):
    x = (torch.randn(4, 2, 8, 16, 16, device=device) * scale + scale).to(torch.bfloat16)
    weight, bias = torch.randn(2, 8, device=device)
    y = torch.vmap(lambda t: gnsilu.group_norm_silu(t, 2, weight, bias, 1e-5, torch.float16))(x)
    assert y.dtype == torch.float16
    for i in range(4):
        assert_exact(y[i], x[i], 2, weight, bias)


@pytest.mark.parametrize("shape", [(3, 2, 8, 5, 7), (3, 2, 8, 5, 7, 2)])
def test_vmap_over_channels_last(shape, device):
    last = torch.channels_last if len(shape) == 5 else torch.channels_last_3d
    x = torch.randn(shape[0] * shape[1], *shape[2:], device=device).to(memory_format=last)
    x = x.unflatten(0, shape[:2])
    y = torch.vmap(lambda t: gnsilu.group_norm_silu(t, 4))(x)
    torch.testing.assert_close(y, torch.stack([gnsilu.group_norm_silu(t, 4) for t in x]))


def test_a_forced_route_under_vmap(monkeypatch):
    x = torch.randn(2, 2, 4, 3)
    for name, words in (("ring", "under vmap PyTorch's operators serve"), ("bogus", "is wanted")):
        monkeypatch.setenv("GNSILU_ROUTE", name)
        with pytest.raises(RuntimeError, match=words):
            torch.vmap(lambda t: gnsilu.group_norm_silu(t, 2))(x)
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    torch.vmap(lambda t: gnsilu.group_norm_silu(t, 2))(x)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 1, 2, 1, 1), (4, 1, 2, 1, 1)),
        ((2, 1, 5, 6), (30, 7, 6, 1)),
        ((2, 3, 1, 1), (3, 1, 7, 5)),
        ((1, 2, 3, 1, 1), (9, 1, 2, 2, 2)),
    ],
)
def test_ambiguous_layouts_are_the_same_with_and_without_grad(shape, strides, device):
    x = torch.empty_strided(shape, strides, device=device).normal_()
    plain = gnsilu.group_norm_silu(x, 1)
    assert gnsilu.group_norm_silu(x.requires_grad_(), 1).stride() == plain.stride()


def test_result_layout_is_the_same_with_and_without_grad(device):
    x = torch.randn(2, 8, 6, 5, device=device).contiguous(memory_format=torch.channels_last)
    plain = gnsilu.group_norm_silu(x, 4)
    with_grad = gnsilu.group_norm_silu(x.requires_grad_(), 4)
    assert plain.stride() == with_grad.stride()
