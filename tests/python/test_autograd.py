"""Gradients: never a silent detach, right by FP64 autograd, no tangent lost."""

from __future__ import annotations

import gnsilu
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

FP64 = torch.float64


def inputs(device, dtype=FP64):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 3, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(6, device=device, dtype=dtype, requires_grad=True)
    return x, weight, bias


@pytest.mark.parametrize("function", [gnsilu.group_norm_silu, gnsilu.group_norm])
def test_gradcheck(function, device):
    def call(x, weight, bias):
        return function(x, 3, weight, bias, 1e-4)

    assert gradcheck(call, inputs(device), check_forward_ad=True)
    assert gradgradcheck(call, inputs(device))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_inputs(which, dtype, device):
    arguments = [
        t.detach().to(dtype).requires_grad_(i in which) for i, t in enumerate(inputs(device))
    ]
    y = gnsilu.group_norm_silu(arguments[0], 3, arguments[1], arguments[2])
    assert y.dtype == dtype and y.requires_grad
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, [arguments[i] for i in which], upstream)

    exact = [t.detach().double().requires_grad_(i in which) for i, t in enumerate(arguments)]
    z = F.silu(F.group_norm(exact[0], 3, exact[1], exact[2]))
    want = torch.autograd.grad(z, [exact[i] for i in which], upstream.double())
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=2**-7, atol=2**-7)


def test_no_gradient_where_none_is_wanted(device):
    x, weight, bias = (t.detach().bfloat16().requires_grad_() for t in inputs(device))
    with torch.no_grad():
        y = gnsilu.group_norm_silu(x, 3, weight, bias)
        assert not y.requires_grad
        with torch.enable_grad():
            assert gnsilu.group_norm_silu(x, 3, weight, bias).requires_grad
    with torch.inference_mode():
        inferred = gnsilu.group_norm_silu(x, 3, weight, bias)
        assert inferred.is_inference()
    assert torch.equal(y, inferred.clone())
    assert not gnsilu.group_norm_silu(x.detach(), 3).requires_grad


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


def test_autocast_does_not_change_the_differentiable_result(device):
    x = inputs(device)[0].detach().bfloat16().requires_grad_()
    want = gnsilu.group_norm_silu(x, 3, dtype=torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = gnsilu.group_norm_silu(x, 3, dtype=torch.float32)
    assert y.dtype == torch.float32 and torch.equal(y, want)


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


def test_result_layout_is_the_same_with_and_without_grad(device):
    x = torch.randn(2, 8, 6, 5, device=device).contiguous(memory_format=torch.channels_last)
    plain = gnsilu.group_norm_silu(x, 4)
    with_grad = gnsilu.group_norm_silu(x.requires_grad_(), 4)
    assert plain.stride() == with_grad.stride()
