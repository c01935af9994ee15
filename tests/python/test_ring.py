"""The ring: groups that all multiprocessors share. Its bits are those of two_pass."""

from __future__ import annotations

import math

import gnsilu
import pytest
import torch
from inputs import BF16, FP16, FP32, HALVES, random_affine, random_x
from reference import assert_exact, same_bits

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")

# Groups of 0.5 to 21 MB.
SHAPES = [
    ((1, 2, 512, 520), 1),  # fewer spans than blocks
    ((1, 2, 1024, 1024), 1),  # one group, which nothing overlaps
    ((2, 64, 300, 200), 8),  # tiles of two rows, the last of a group cut short
    ((1, 16, 187, 187), 2),  # odd rows: vectors of two channels
    ((1, 256, 9, 9, 131), 4),  # 64 channels a group
    ((3, 8, 1000, 1000), 4),
    ((5, 32, 256, 256), 4),
    ((1, 8, 2048, 1280), 2),  # 21 MB
]


def both(x, groups, weight=None, bias=None, dtype=None, silu=True):
    """By the ring and by two_pass."""
    arguments = (x, groups, weight, bias, 1e-6, dtype, silu)
    return (
        torch.ops.gnsilu._with_config(*arguments, "ring", 768, 8, 0),
        torch.ops.gnsilu._with_config(*arguments, "two_pass", 128, 8, 0),
    )


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("y_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_case_06_groups_that_all_multiprocessors_share(shape, groups, dtype, y_dtype, silu):
    x = random_x(shape, dtype, GPU)
    weight, bias = random_affine(shape[1], GPU)
    y, want = both(x, groups, weight, bias, y_dtype, silu)
    assert same_bits(y, want)
    assert_exact(y, x, groups, weight, bias, 1e-6, silu)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("low", "high"), [(1000, 1004), (-0.001, 0.001), (-3e4, 3e4), (5, 5), (0, 0)], ids=str
)
def test_case_03_two_values_and_one(low, high, dtype):
    x = torch.full((1, 4, 512, 600), low, dtype=dtype, device=GPU)
    x[..., ::2] = high
    y, want = both(x, 2)
    assert same_bits(y, want)
    assert_exact(y, x, 2, eps=1e-6)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_case_02_any_magnitude(scale):
    x = (torch.randn(1, 4, 512, 600, device=GPU) * scale).to(BF16)
    y, want = both(x, 2)
    assert same_bits(y, want)
    assert_exact(y, x, 2, eps=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sign", [1, -1])
def test_case_07_tail_of_silu(sign, dtype):
    """z from -700 to 700, also where the scale is negative; and in one channel of many."""
    x = random_x((1, 8, 512, 600), dtype, GPU)
    weight = torch.full((8,), 1.0, device=GPU)
    weight[3] = sign * 150.0
    bias = torch.zeros(8, device=GPU)
    y, want = both(x, 2, weight, bias)
    assert same_bits(y, want)
    assert_exact(y, x, 2, weight, bias, 1e-6)
    assert torch.signbit(y[y == 0]).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_08_one_bad_element_spoils_its_group_alone(bad):
    x = random_x((2, 8, 512, 600), BF16, GPU)
    clean, _ = both(x, 4)
    x[1, 3, 77, 5] = bad
    y, want = both(x, 4)
    assert same_bits(y, want)
    assert y[1, 2:4].isnan().all()
    kept = torch.ones(2, 8, dtype=torch.bool, device=GPU)
    kept[1, 2:4] = False
    assert same_bits(y[kept], clean[kept])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "groups", "blocks"),
    [
        ((3, 8, 1448, 1456), 2, 66),  # of 17 MB: two tiles of 16 a block are read again (H200)
        ((2, 4, 1000, 1000), 2, 14),  # four of 18
        ((2, 4, 1000, 1000), 2, 10),  # twelve of 26, the most that there can be
        ((5, 4, 1000, 904), 2, 13),  # of some blocks two more than of others
        ((5, 4, 1000, 904), 2, 9),
        ((1, 4, 2048, 2048), 1, 0),
    ],
    ids=str,
)
def test_case_06_groups_that_are_read_again(shape, groups, blocks, dtype):
    x = random_x(shape, dtype, GPU)
    weight, bias = random_affine(shape[1], GPU)
    arguments = (x, groups, weight, bias, 1e-6, None, True)
    y = torch.ops.gnsilu._with_config(*arguments, "ring", 768, 8, blocks)
    assert same_bits(y, torch.ops.gnsilu._with_config(*arguments, "two_pass", 128, 8, 0))


def test_more_groups_than_the_workspace_holds():
    x = random_x((20, 32, 192, 192), BF16, GPU).repeat(22, 1, 1, 1)  # 1760 groups of 36 spans
    y, want = both(x, 4)
    assert same_bits(y, want)


def test_inside_a_graph_and_after_it():
    x = random_x((1, 64, 512, 512), BF16, GPU)
    weight, bias = random_affine(64, GPU)
    want = gnsilu.group_norm_silu(x, 8, weight, bias)
    assert gnsilu.explain(x, 8).route == "ring"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gnsilu.group_norm_silu(x, 8, weight, bias)
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert same_bits(y, want)
    x.neg_()
    graph.replay()
    assert_exact(y, x, 8, weight, bias)


def test_on_several_streams_at_a_time():
    xs = [random_x((1, 32, 512, 512), dtype, GPU) for dtype in (*HALVES, *HALVES)]
    wants = [gnsilu.group_norm_silu(x, 8) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(50):
        results = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(gnsilu.group_norm_silu(x, 8))
        torch.cuda.synchronize()
        assert all(same_bits(y, want) for y, want in zip(results, wants, strict=True))


def test_beside_a_kernel_that_stays():
    """Beside it or, where the driver does not share the GPU out, behind it: never in part."""
    x = random_x((2, 64, 512, 512), BF16, GPU)
    want = gnsilu.group_norm_silu(x, 8)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2**29)  # clocks: a quarter of a second
    results = [gnsilu.group_norm_silu(x, 8) for _ in range(20)]
    torch.cuda.current_stream().synchronize()
    assert all(same_bits(y, want) for y in results)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: x.view(-1)[1:-7].view(1, 8, -1), "x does not begin at a multiple of 16 bytes"),
        (lambda x: x[..., 1:].contiguous(), "a group is no multiple of 8 elements"),
        (lambda x: x.view(1, 16384, 16, 16), "a group has more than 64 channels"),
        (lambda x: x[..., :64].contiguous(), "a group is too small"),
        (lambda x: x.expand(64, -1, -1).reshape(1, 8, -1), "a group does not fit into the GPU's"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(make, reason, monkeypatch):
    x = make(torch.zeros(1, 8, 524288, dtype=BF16, device=GPU))
    assert gnsilu.explain(x, 8).route != "ring"
    monkeypatch.setenv("GNSILU_ROUTE", "ring")
    for function in (gnsilu.group_norm_silu, gnsilu.explain):
        with pytest.raises(RuntimeError, match=f"route ring is not possible: {reason}"):
            function(x, 8)


def test_blocks_that_no_gpu_has_are_refused():
    x = random_x((1, 8, 1024, 1024), FP16, GPU)
    for blocks in (-1, 3, 1000, 2**32 + 66):
        with pytest.raises(RuntimeError, match=f"blocks is {blocks};"):
            torch.ops.gnsilu._with_config(
                x, 8, None, None, 1e-6, None, True, "ring", 768, 8, blocks
            )
