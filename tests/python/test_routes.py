"""Which route a call takes, what explain() says of it, and GNSILU_ROUTE."""

from __future__ import annotations

import dataclasses

import gnsilu
import pytest
import torch
from inputs import BF16, FP16, random_affine, random_x
from reference import assert_exact

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
FUSED = ("ring", "resident", "two_pass", "three_pass")
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
    for route in FUSED:
        monkeypatch.setenv("GNSILU_ROUTE", route)
        for function in (gnsilu.group_norm_silu, gnsilu.group_norm, gnsilu.explain):
            with pytest.raises(RuntimeError, match=f"{route} is not possible: {reason}"):
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
def test_routes_of_a_gpu(monkeypatch):
    large = torch.zeros(1, 32, 512, 512, dtype=BF16, device="cuda")
    explanation = gnsilu.explain(large, 1)
    assert (explanation.route, explanation.bytes_per_element) == ("ring", 4)
    assert 0 < explanation.workspace_bytes <= 1 << 20 and explanation.config is None
    odd = torch.zeros(1, 32, 513, 511, dtype=BF16, device="cuda")[:, :31].contiguous()
    explanation = gnsilu.explain(odd, 1)  # a group of an odd number of elements
    assert (explanation.route, explanation.bytes_per_element) == ("two_pass", 6)
    monkeypatch.setenv("GNSILU_ROUTE", "two_pass")
    explanation = gnsilu.explain(large, 2)
    assert (explanation.route, explanation.bytes_per_element) == ("two_pass", 6)
    assert 0 < explanation.workspace_bytes <= 1 << 20
    assert isinstance(explanation.config, gnsilu.LaunchConfig)
    assert "128 threads" in str(explanation)
    assert gnsilu.explain(large, 2, dtype=torch.float32).bytes_per_element == 8
    monkeypatch.delenv("GNSILU_ROUTE")
    for x, route in (
        (large[:, :, :4, :512].contiguous(), "resident"),
        (large[:, :, :1, :8].contiguous(), "three_pass"),
    ):
        found = gnsilu.explain(x, 16)
        assert (found.route, found.bytes_per_element) == (route, 4)
        assert (found.workspace_bytes, found.config) == (0, None)
    monkeypatch.setenv("GNSILU_ROUTE", "three_pass")
    assert gnsilu.explain(large, 2).bytes_per_element == 8
    monkeypatch.setenv("GNSILU_ROUTE", "resident")
    for function in (gnsilu.group_norm_silu, gnsilu.explain):
        with pytest.raises(RuntimeError, match="a group does not fit into shared memory"):
            function(large, 2)


@pytest.mark.gpu
def test_forced_routes_are_all_exact(monkeypatch):
    # FP16 has so many values that a misrounded one is of few elements.
    x = random_x((1, 32, 192, 192), FP16, torch.device("cuda"))
    weight, bias = random_affine(32, x.device)
    results = []
    for route in (*FUSED, "fallback"):
        monkeypatch.setenv("GNSILU_ROUTE", route)
        assert gnsilu.explain(x, 4).reason == "asked for"
        results.append(gnsilu.group_norm_silu(x, 4, weight, bias, dtype=BF16))
        assert_exact(results[-1], x, 4, weight, bias)
    for result in results[1:]:
        assert (results[0] != result).float().mean() < 1e-4


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
    """Samples that share a slice, groups that do, and groups larger than one: of 2^19 elements on
    a CPU, 2^23 on a GPU."""
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    columns = 1 if device.type == "cpu" else 16
    for shape, groups in (
        ((5, 8, 100, 201), 2),
        ((2, 8, 400, 401), 4),
        ((1, 8, 400, 401), 1),
    ):
        x = random_x((*shape[:-1], columns * shape[-1]), BF16, device)
        weight, bias = random_affine(8, device)
        assert_exact(gnsilu.group_norm_silu(x, groups, weight, bias), x, groups, weight, bias)
        wide = x[:1].float()
        want = torch.group_norm(wide, groups, weight, bias)
        got = gnsilu.group_norm(wide, groups, weight, bias)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
def test_fallback_bounds_its_temporaries(monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    x = torch.randn(1, 128, 1024, 1024, dtype=BF16, device="cuda")
    gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = gnsilu.group_norm_silu(x, 32)
    beyond = torch.cuda.max_memory_allocated() - before - y.numel() * 2
    assert beyond <= 2 * 64 * 2**20  # an FP64 slice, normalised in place, and some
