"""What a result's bits depend on: values, shape, route; not configuration, grid, batch or run."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from gnsilu import _C
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x
from reference import MIN_SHARE, assert_exact, same_bits

GPU = torch.device("cuda")

# Groups of one span, small ones too, of several, with a last span cut short, of odd rows.
SHAPES = [
    ((1, 32, 65, 67), 4),
    ((2, 24, 128, 128), 2),
    ((1, 8, 1, 6141), 2),
    ((3, 12, 8, 8), 3),
    ((2, 320, 16, 16), 32),
    ((1, 30, 7, 7), 30),
    ((5, 64, 2, 2), 64),
    ((3, 32, 5, 1), 8),
    ((2, 24, 3, 5), 2),
    ((1, 8, 700, 760), 2),  # the ring
]
BLOCKS = {"three_pass": (0,), "two_pass": (0,), "resident": (1, 2, 3, 7), "ring": (0, 101, 66, 44)}


@pytest.mark.gpu
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32), (BF16, FP16)], ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_case_12_every_candidate_gives_the_same_bits(shape, groups, dtypes, silu):
    x = random_x(shape, dtypes[0], GPU)
    weight, bias = random_affine(shape[1], GPU)
    arguments = (x, groups, weight, bias, 1e-6, dtypes[1], silu)
    function = gnsilu.group_norm_silu if silu else gnsilu.group_norm
    chosen = function(*arguments[:-1])
    group_bytes = x[0].nbytes // groups
    for route, blocks in BLOCKS.items():
        if route == "ring" and (group_bytes < 1 << 20 or dtypes[1] == FP32):
            continue
        if route == "resident" and group_bytes > 500_000:
            continue
        results = [
            torch.ops.gnsilu._with_config(
                *arguments, route, each.threads, each.vectors_in_flight, count
            )
            for each in _C.candidates(_C.Route.__members__[route])
            for count in blocks
            if route != "resident" or group_bytes // count < 200_000
        ]
        assert len(results) > 1
        assert all(same_bits(result, results[0]) for result in results)
        assert_exact(results[0], x, groups, weight, bias, 1e-6, silu)
        # Those that may be chosen for one shape share the statistics.
        assert route == "three_pass" or same_bits(results[0], chosen)


@pytest.mark.gpu
def test_other_configurations_are_refused():
    x = random_x((1, 64, 8, 8), BF16, GPU)
    with pytest.raises(RuntimeError, match="config is 3 threads"):
        torch.ops.gnsilu._with_config(x, 4, None, None, 1e-6, None, True, "two_pass", 3, 4, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 64, 256, 256), 32), ((2, 320, 16, 16), 32), ((1, 6, 129, 65), 2), ((1, 32, 256, 264), 2)],
)
def test_case_12_a_thousand_runs_under_contention(shape, groups, dtype):
    x = random_x(shape, dtype, GPU)
    weight, bias = random_affine(shape[1], GPU)
    want = gnsilu.group_norm_silu(x, groups, weight, bias)
    torch.cuda.synchronize()
    noise, side = torch.randn(1 << 25, device=GPU), torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device=GPU)
    for run in range(1000):
        if run % 4 == 0:  # 0.4 GB of traffic and every SM, while the next calls run
            with torch.cuda.stream(side):
                noise.mul_(1.0001)
        y = gnsilu.group_norm_silu(x, groups, weight, bias)
        differing += (y.view(torch.int16) != want.view(torch.int16)).sum()
    assert differing.item() == 0
    assert_exact(want, x, groups, weight, bias)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 65, 200])
def test_case_12_a_sample_alone_keeps_its_bits(size, dtype, routed_device):
    x = random_x((5, 32, size, size), dtype, routed_device)
    weight, bias = random_affine(32, routed_device)
    y = gnsilu.group_norm_silu(x, 8, weight, bias)
    for sample in (0, 2, 4):
        alone = gnsilu.group_norm_silu(x[sample : sample + 1].contiguous(), 8, weight, bias)
        assert same_bits(alone, y[sample : sample + 1].contiguous())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [8, 65, 200])
def test_case_12_permuted_groups_and_samples_keep_their_bits(size, dtype, routed_device):
    x = random_x((3, 32, size, size), dtype, routed_device)
    weight, bias = random_affine(32, routed_device)
    y = gnsilu.group_norm_silu(x, 8, weight, bias)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4], device=routed_device)
    channels = (order[:, None] * 4 + torch.arange(4, device=routed_device)).view(-1)
    samples = torch.tensor([2, 0, 1], device=routed_device)
    permuted = gnsilu.group_norm_silu(
        x[samples][:, channels].contiguous(), 8, weight[channels], bias[channels]
    )
    assert same_bits(permuted, y[samples][:, channels].contiguous())


@pytest.mark.parametrize("spatial", [9, 65, 300])
def test_case_12_scaling_by_a_power_of_two_keeps_the_bits(spatial, routed_device):
    x = random_x((1, 16, spatial, spatial), BF16, routed_device)
    weight, bias = random_affine(16, routed_device)
    want = gnsilu.group_norm_silu(x, 4, weight, bias, eps=2.0**-20)
    for k in (-90, -40, -3, 5, 60, 110):
        y = gnsilu.group_norm_silu(x * 2.0**k, 4, weight, bias, eps=2.0 ** (2 * k - 20))
        assert same_bits(y, want), k
    # FP16 has few exponents: whole numbers up to 255 leave room for these.
    x = torch.randint(-255, 256, (1, 16, spatial, spatial), device=routed_device).to(FP16)
    want = gnsilu.group_norm_silu(x, 4, weight, bias, eps=2.0**-10)
    for k in (-24, -10, 3, 8):
        y = gnsilu.group_norm_silu(x * 2.0**k, 4, weight, bias, eps=2.0 ** (2 * k - 10))
        assert same_bits(y, want), k


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_routes_agree(dtype, monkeypatch):
    """Both exact, they differ where one of them misrounds."""
    for shape, groups in SHAPES:
        x = random_x(shape, dtype, GPU)
        weight, bias = random_affine(shape[1], GPU)
        results = []
        for route in ("auto", "two_pass", "three_pass", "fallback"):
            monkeypatch.setenv("GNSILU_ROUTE", route)
            results.append(gnsilu.group_norm_silu(x, groups, weight, bias))
            assert_exact(results[-1], x, groups, weight, bias)
        assert same_bits(results[0], results[1])
        for other in results[2:]:
            differing = int((results[0] != other).sum())
            assert differing <= max(4, (1 - MIN_SHARE[dtype]) * x.numel()), shape
