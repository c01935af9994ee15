"""Which route a call takes, what explain() says of it, and GNSILU_ROUTE."""

from __future__ import annotations

import dataclasses

import gnsilu
import pytest
import torch

BF16 = torch.bfloat16
GPU = [pytest.mark.gpu]


def tensor(**change) -> torch.Tensor:
    arguments = {"shape": (1, 32, 65, 64), "dtype": BF16, "device": "cuda", **change}
    return torch.zeros(arguments["shape"], dtype=arguments["dtype"], device=arguments["device"])


FALLBACKS = {
    "CPU": (lambda: tensor(device="cpu"), "x is not on a CUDA device"),
    "FP32": pytest.param(
        lambda: tensor(dtype=torch.float32), "x is neither bfloat16 nor float16", marks=GPU
    ),
    "channels_last": pytest.param(
        lambda: tensor().contiguous(memory_format=torch.channels_last),
        "x is not contiguous in NCHW order",
        marks=GPU,
    ),
    "strided": pytest.param(
        lambda: tensor()[..., ::2], "x is not contiguous in NCHW order", marks=GPU
    ),
    "gradient": pytest.param(lambda: tensor().requires_grad_(), "a gradient is needed", marks=GPU),
    "gradient on the CPU": (lambda: tensor(device="cpu").requires_grad_(), "a gradient is needed"),
}
CASES = [
    pytest.param(*case.values, id=name, marks=case.marks)
    if hasattr(case, "marks")
    else pytest.param(*case, id=name)
    for name, case in FALLBACKS.items()
]


@pytest.mark.parametrize(("make", "reason"), CASES)
def test_fallback_says_why_and_refuses_to_be_forced(make, reason, monkeypatch):
    x = make()
    explanation = gnsilu.explain(x, 8)
    assert (explanation.route, explanation.reason) == ("fallback", reason)
    assert explanation.config is None and explanation.workspace_bytes == 0
    monkeypatch.setenv("GNSILU_ROUTE", "three_pass")
    for function in (gnsilu.group_norm_silu, gnsilu.group_norm, gnsilu.explain):
        with pytest.raises(RuntimeError, match=f"three_pass is not possible: {reason}"):
            function(x, 8)
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    assert gnsilu.explain(x, 8).reason == "asked for"
    gnsilu.group_norm_silu(x, 8)


@pytest.mark.parametrize("value", ["", "auto"])
def test_route_is_free_by_default(value, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", value)
    x = tensor(device="cpu")
    gnsilu.group_norm_silu(x, 8)
    assert gnsilu.explain(x, 8).reason == "x is not on a CUDA device"


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=GPU)])
def test_unknown_route_is_an_error(device, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", "quickest")
    for function in (gnsilu.group_norm_silu, gnsilu.explain):
        with pytest.raises(RuntimeError, match="GNSILU_ROUTE is 'quickest'; auto, fallback"):
            function(tensor(device=device), 8)


@pytest.mark.gpu
def test_three_pass_on_the_gpu():
    x = tensor()
    explanation = gnsilu.explain(x, 2)
    assert explanation.route == "three_pass"
    assert explanation.bytes_per_element == 8
    assert 0 < explanation.workspace_bytes <= 1 << 20
    assert isinstance(explanation.config, gnsilu.LaunchConfig)
    assert "128 threads" in str(explanation)
    small = gnsilu.explain(x[:, :, :8].contiguous(), 8)
    assert (small.route, small.workspace_bytes, small.config) == ("three_pass", 0, None)
    assert gnsilu.explain(x, 2, dtype=torch.float32).bytes_per_element == 10


@pytest.mark.gpu
def test_forced_routes_give_their_values(monkeypatch):
    x = torch.randn(1, 32, 64, 64, device="cuda").to(BF16)
    monkeypatch.setenv("GNSILU_ROUTE", "three_pass")
    fused = gnsilu.group_norm_silu(x, 8)
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    fallback = gnsilu.group_norm_silu(x, 8)
    want = torch.nn.functional.silu(torch.group_norm(x.float(), 8)).to(BF16)
    assert torch.equal(fallback, want)
    assert (fused != fallback).float().mean() < 1e-3


def test_explain_checks_its_arguments():
    with pytest.raises(RuntimeError, match="num_groups is 7"):
        gnsilu.explain(tensor(device="cpu"), 7)


def test_explanation_and_build_info_are_frozen_and_readable():
    explanation = gnsilu.explain(tensor(device="cpu"), 8)
    info = gnsilu.build_info()
    for value in (explanation, info):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, "other")
    assert str(explanation).startswith("fallback: x is not on a CUDA device; ")
    assert str(info).startswith(f"gnsilu {gnsilu.__version__}, torch {info.torch}, ")
    assert info.torch.split(".")[:2] == torch.__version__.split(".")[:2]


def test_fallback_works_in_slices(device, monkeypatch):
    """More than 64 MiB of FP32 for a sample, and samples that share a slice."""
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    for shape, groups in (((2, 8, 1600, 1500), 4), ((40, 8, 320, 320), 2), ((1, 2, 4200, 4100), 1)):
        x = torch.randn(shape, device=device).to(BF16)
        weight, bias = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
        y = gnsilu.group_norm_silu(x, groups, weight, bias)
        z = torch.group_norm(x.float(), groups, weight, bias)
        torch.testing.assert_close(y, torch.nn.functional.silu(z).to(BF16), rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_fallback_bounds_its_temporaries(monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    x = torch.randn(1, 128, 1024, 1024, device="cuda").to(BF16)
    gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = gnsilu.group_norm_silu(x, 32)
    beyond = torch.cuda.max_memory_allocated() - before - y.numel() * 2
    assert beyond <= 3 * 64 * 2**20  # an FP32 slice, its normalised copy, and some
