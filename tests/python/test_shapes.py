"""Sizes: every division into groups, maps of any size and rank, empty ones."""

from __future__ import annotations

from collections.abc import Iterator

import gnsilu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x
from reference import assert_exact
from torch.autograd import DeviceType

# --- channels and groups ------------------------------------------------------------------------

CHANNELS = (1, 2, 3, 6, 30, 48, 96, 128, 320, 384, 640, 960, 1152, 1280, 1920, 2560, 3072, 4096)


def divisions() -> Iterator[tuple[int, int]]:
    for channels in CHANNELS:
        yield from (
            (channels, groups) for groups in range(1, channels + 1) if not channels % groups
        )


@pytest.mark.parametrize("samples", [1, 2, 33])
def test_case_16_every_division_of_the_usual_channel_counts(samples, routed_device):
    spatial_sizes = (1, 2, 3, 5, 7)
    for index, (channels, groups) in enumerate(divisions()):
        shape = (samples, channels, spatial_sizes[index % 5])
        x = random_x(shape, HALVES[index % 2], routed_device)
        weight, bias = random_affine(channels, routed_device)
        y = gnsilu.group_norm_silu(x, groups, weight, bias)
        assert_exact(y, x, groups, weight, bias)


def assert_groups_are_apart(shape: tuple[int, ...], groups: int, device: torch.device) -> None:
    """Every second group is NaN, then the others: the rest exact, so nothing of them was read or
    overwritten."""
    samples, channels = shape[:2]
    x = random_x(shape, BF16, device)
    for poisoned in (0, 1):
        by_group = x.clone().view(samples, groups, channels // groups, -1)
        by_group[:, poisoned::2] = float("nan")
        y = gnsilu.group_norm_silu(by_group.view(shape), groups).view(by_group.shape)
        assert y[:, poisoned::2].isnan().all()
        clean = slice(1 - poisoned, None, 2)
        count = len(range(groups)[clean])
        assert_exact(y[:, clean].flatten(1, 2), by_group[:, clean].flatten(1, 2), count)


@pytest.mark.parametrize("per_group", [3, 5, 6, 7, 10, 12, 20, 24, 30])
def test_case_17_groups_do_not_touch_their_neighbours(per_group, routed_device):
    for size in ((1,), (7,), (49,), (1023,), (1025,), (32, 32)):
        assert_groups_are_apart((2, 3 * per_group, *size), 3, routed_device)


def test_case_17_sixteen_groups_of_three_channels(routed_device):
    assert_groups_are_apart((1, 48, 32, 32), 16, routed_device)


# --- the map ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spatial", [1, 2, 3, 7, 31, 33, 49, 127, 200, 1000, 1023, 1025, 4097, 6141]
)
def test_case_18_maps_of_any_size_have_mean_0_and_deviation_1(spatial, routed_device):
    for per_group in (1, 3, 4):
        x = random_x((2, 3 * per_group, spatial), BF16, routed_device)
        assert_exact(gnsilu.group_norm_silu(x, 3), x, 3)
        z = gnsilu.group_norm(x, 3, eps=1e-12, dtype=FP32)
        assert_exact(z, x, 3, eps=1e-12, activation=False)
        by_group = z.double().view(6, -1)
        assert by_group.mean(-1).abs().max() < 2.0**-20
        if per_group * spatial == 1:
            assert not z.any()  # one element is its own mean
        else:
            assert (by_group.var(-1, correction=0) - 1).abs().max() < 2.0**-19


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((64, 256, 1, 1), 32), ((1024, 512, 7, 7), 8), ((1024, 512, 1, 1), 8)],
    ids=str,
)
def test_case_20_many_small_maps(shape, groups, routed_device):
    x = random_x(shape, BF16, routed_device)
    weight, bias = random_affine(shape[1], routed_device)
    assert_exact(gnsilu.group_norm_silu(x, groups, weight, bias), x, groups, weight, bias)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 3),
    groups=st.integers(1, 6),
    per_group=st.integers(1, 7),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    half=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, groups, per_group, height, width, half, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    dtype = FP16 if half else BF16
    x = (torch.randn(n, groups * per_group, height, width, device=device) * 3 + 1).to(dtype)
    weight = torch.randn(groups * per_group, device=device)
    assert_exact(gnsilu.group_norm_silu(x, groups, weight), x, groups, weight)


# --- empty --------------------------------------------------------------------------------------

NO_SAMPLES = [(0, 64, 8, 8), (0, 64, 0, 0), (0, 64)]
NO_MAP = [(2, 64, 0, 8), (2, 64, 0), (2, 64, 3, 0, 5)]
NO_CHANNELS = [(2, 0, 8, 8), (2, 0, 0), (0, 0)]
EMPTY = NO_SAMPLES + NO_MAP + NO_CHANNELS


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_case_21_empty_inputs_give_empty_results(shape, routed_device):
    for device in (routed_device, torch.device("meta")):
        x = torch.empty(shape, dtype=BF16, device=device)
        for function in (gnsilu.group_norm_silu, gnsilu.group_norm):
            y = function(x, 32, dtype=FP16)
            assert (y.shape, y.dtype, y.device) == (x.shape, FP16, x.device)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_case_21_arguments_of_empty_calls_are_checked(shape, routed_device):
    wrong = torch.zeros(65, device=routed_device)
    x = torch.empty(shape, dtype=BF16, device=routed_device)
    for arguments, message in (
        ({"num_groups": 0}, "num_groups is 0"),
        ({"num_groups": 32, "eps": -1.0}, "eps is -1"),
        ({"num_groups": 32, "weight": wrong}, r"weight has shape \[65\]"),
        ({"num_groups": 32, "bias": wrong}, r"bias has shape \[65\]"),
        ({"num_groups": 32, "dtype": torch.int32}, "dtype is Int"),
    ):
        with pytest.raises(RuntimeError, match=message):
            gnsilu.group_norm_silu(x, **arguments)
    if shape[1] == 64:
        with pytest.raises(RuntimeError, match="num_groups is 7, x has 64 channels"):
            gnsilu.group_norm_silu(x, 7)


def assert_no_gradient(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.empty(shape, dtype=BF16, device=device, requires_grad=True)
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    gnsilu.group_norm_silu(x, 32, weight).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("shape", NO_SAMPLES, ids=str)
def test_case_21_no_sample_gives_no_gradient(shape, device):
    assert_no_gradient(shape, device)


@pytest.mark.parametrize("shape", NO_MAP, ids=str)
def test_case_21_an_empty_map_gives_no_gradient(shape, device):
    assert_no_gradient(shape, device)


@pytest.mark.gpu
def test_case_21_nothing_is_launched_for_empty_inputs(monkeypatch):
    def kernels(shapes: list[tuple[int, ...]]) -> list[str]:
        inputs = [torch.empty(shape, dtype=BF16, device="cuda") for shape in shapes]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for x in inputs:
                gnsilu.group_norm_silu(x, 32)
                gnsilu.explain(x, 32)
            torch.cuda.synchronize()
        return [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]

    assert kernels(EMPTY) == []
    (kernel,) = kernels([(2, 64, 8, 8)])  # explain() launches nothing
    assert "small_groups" in kernel
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    assert kernels(EMPTY) == []


# --- rank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(5, 12), (3, 12, 50), (2, 12, 9, 7), (2, 12, 3, 10, 9), (1, 6, 2, 3, 4, 5)], ids=str
)
def test_case_24_any_rank(shape, routed_device):
    for dtype in HALVES:
        x = random_x(shape, dtype, routed_device)
        weight, bias = random_affine(shape[1], routed_device)
        assert_exact(gnsilu.group_norm_silu(x, 3, weight, bias), x, 3, weight, bias)


@pytest.mark.parametrize("shape", [(), (16,)], ids=str)
def test_case_24_rank_0_and_1_are_refused(shape, device):
    for where in (device, torch.device("meta")):
        x = torch.empty(shape, dtype=BF16, device=where)
        for function in (gnsilu.group_norm_silu, gnsilu.group_norm, gnsilu.explain):
            with pytest.raises(RuntimeError, match=f"x has {len(shape)} dimensions"):
                function(x, 1)
