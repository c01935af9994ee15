"""Strides, memory formats, alignment: what is read and written, and nothing else."""

from __future__ import annotations

import math

import gnsilu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BF16, FP16, FP32, random_affine, random_x
from reference import assert_exact
from torch import Tensor

DTYPES = [BF16, FP16, FP32, torch.float64]
GPU = pytest.mark.gpu


def meta_strides(x: Tensor, groups: int) -> tuple[int, ...]:
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.ops.gnsilu.group_norm_silu(meta, groups).stride()


def assert_exact_in_layout(x: Tensor, groups: int) -> Tensor:
    """Exact, and laid out as the Meta kernel says, whatever x's strides; returns the result."""
    weight, bias = random_affine(x.shape[1], x.device)
    y = gnsilu.group_norm_silu(x, groups, weight, bias)
    assert_exact(y, x, groups, weight, bias)
    assert y.stride() == meta_strides(x, groups)
    with_grad = gnsilu.group_norm_silu(x.detach().requires_grad_(), groups, weight, bias)
    assert with_grad.stride() == y.stride()
    return y


# --- memory formats and ambiguous strides --------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2])
def test_case_25_channels_last(samples, device):
    x = random_x((samples, 32, 24, 24), BF16, device)
    y = assert_exact_in_layout(x.contiguous(memory_format=torch.channels_last), 8)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_case_25_channels_last_3d(device):
    x = random_x((2, 16, 3, 6, 5), BF16, device)
    y = assert_exact_in_layout(x.contiguous(memory_format=torch.channels_last_3d), 4)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


def with_strides(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    # The strides of dimensions of size 1 say nothing: the memory needed is that of the others.
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return random_x((size,), BF16, device).as_strided(shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides", "groups"),
    [
        ((2048, 384, 1, 1), (384, 1, 786432, 1), 8),
        ((2048, 384, 1, 1), (384, 1, 384, 384), 8),
        ((1, 32, 4, 4), (7, 16, 4, 1), 8),  # one sample, a stride that says nothing
        ((1, 32, 4, 4), (1, 1, 128, 32), 8),  # the same in channels_last
        ((2, 1, 5, 6), (30, 1, 6, 1), 1),  # one channel
        ((2, 1, 5, 6), (30, 30, 6, 1), 1),
        ((2, 1, 5, 6), (30, 7, 6, 1), 1),
        ((2, 32, 1, 1), (32, 1, 32, 32), 8),  # a map of one element
        ((2, 32, 1, 1), (32, 1, 1, 1), 8),
        ((2, 32, 1, 1), (32, 1, 5, 3), 8),
        ((1, 1, 1, 1), (3, 5, 7, 9), 1),
    ],
)
def test_case_25_ambiguous_strides(shape, strides, groups, device):
    assert_exact_in_layout(with_strides(shape, strides, device), groups)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_case_25_any_strides(data):
    """Dimensions laid out in any order, with gaps, repeated or of one element."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank = data.draw(st.integers(2, 5), "rank")
    shape = [data.draw(st.sampled_from((1, 2, 3, 4)), "size") for _ in range(rank)]
    strides = [0] * rank
    stride = 1
    for dimension in data.draw(st.permutations(range(rank)), "order"):
        strides[dimension] = stride
        if shape[dimension] == 1:
            strides[dimension] = data.draw(st.integers(0, 9), "stride of one element")
        elif data.draw(st.integers(0, 9), "expanded") == 0:
            strides[dimension] = 0
        else:
            stride *= shape[dimension]
        stride += data.draw(st.sampled_from((0, 0, 1, 5)), "gap")
    channels = shape[1]
    groups = data.draw(st.sampled_from([g for g in (1, 2, 3, 4) if channels % g == 0]), "groups")
    assert_exact_in_layout(with_strides(tuple(shape), tuple(strides), device), groups)


# --- views ---------------------------------------------------------------------------------------

VIEWS = {
    "every second channel": ((2, 64, 24, 20), lambda x: x[:, ::2]),
    "every second row": ((2, 32, 24, 20), lambda x: x[:, :, 1::2]),
    "every second column": ((2, 32, 24, 20), lambda x: x[..., ::2]),
    "every second sample": ((4, 32, 12, 10), lambda x: x[1::2]),
    "transposed": ((2, 32, 24, 20), lambda x: x.transpose(2, 3)),
    "samples and channels swapped": ((32, 2, 12, 10), lambda x: x.transpose(0, 1)),
    "expanded over the height": ((2, 32, 1, 20), lambda x: x.expand(-1, -1, 24, -1)),
    "expanded over the batch": ((1, 32, 24, 20), lambda x: x.expand(3, -1, -1, -1)),
    "expanded over the channels": ((2, 1, 24, 20), lambda x: x.expand(-1, 32, -1, -1)),
    "some channels of two samples": ((2, 64, 24, 20), lambda x: x[:, 16:48]),
    "some channels of one sample": ((1, 64, 24, 20), lambda x: x[:, 16:48]),
    "a tile": ((2, 32, 30, 30), lambda x: x[..., 3:27, 5:25]),
    "the last rows of one channel": ((1, 1, 30, 30), lambda x: x[..., 3:, :]),
    "a negated view": ((2, 32, 24, 20), torch._neg_view),
}


@pytest.mark.parametrize("view", VIEWS)
def test_case_26_views(view, device):
    shape, make = VIEWS[view]
    x = make(random_x(shape, BF16, device))
    assert_exact_in_layout(x, 8 if x.shape[1] == 32 else 1)
    if device.type == "cuda" and not x.is_neg():
        fused = gnsilu.explain(x, 1).route != "fallback"
        assert fused == (view in ("some channels of one sample", "the last rows of one channel"))


# --- alignment -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 6, 5, 7), (2, 3, 71, 65), (1, 16, 64, 64)])
@pytest.mark.parametrize("y_dtype", [BF16, FP32])
def test_case_27_x_at_any_offset_of_a_buffer(shape, y_dtype, routed_device):
    numel = math.prod(shape)
    groups = 1 if shape[1] % 2 else shape[1] // 2
    values = random_x((numel,), BF16, routed_device)
    weight, bias = random_affine(shape[1], routed_device)
    want = None
    for offset in range(16):
        buffer = torch.full((numel + 32,), float("nan"), dtype=BF16, device=routed_device)
        x = buffer[offset : offset + numel].view(shape)
        x.view(-1).copy_(values)
        before = buffer.clone()
        y = gnsilu.group_norm_silu(x, groups, weight, bias, dtype=y_dtype)
        if want is None:
            want = y
            assert_exact(y, x, groups, weight, bias)
        assert torch.equal(y, want)  # alignment changes no bit; a NaN from outside would show
        assert torch.equal(buffer.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_27_parameters_at_any_offset_of_a_buffer(dtype, routed_device):
    x = random_x((2, 24, 15, 9), BF16, routed_device)
    parameters = [p.to(dtype) for p in random_affine(24, routed_device)]
    want = gnsilu.group_norm_silu(x, 4, *parameters)
    assert_exact(want, x, 4, *parameters)
    for offset in range(16):
        buffers = [
            torch.cat([p.new_full((offset,), float("nan")), p, p.new_full((9,), float("nan"))])
            for p in parameters
        ]
        weight, bias = (buffer[offset : offset + 24] for buffer in buffers)
        assert torch.equal(gnsilu.group_norm_silu(x, 4, weight, bias), want)


SENTINEL = 0xA5


def slots_between_sentinels(nbytes: int) -> tuple[list[Tensor], list[int]]:
    """Sentinels, and the addresses of free blocks of nbytes that have one on either side."""
    # First what earlier tests have left is filled: a block of a new segment ends that.
    torch.cuda.empty_cache()
    reserved, plugs = torch.cuda.memory_reserved(), []
    while torch.cuda.memory_reserved() == reserved:
        plugs.append(torch.full((nbytes,), SENTINEL, dtype=torch.uint8, device="cuda"))
    blocks = [torch.full((nbytes,), SENTINEL, dtype=torch.uint8, device="cuda") for _ in range(65)]
    outer = {block.data_ptr() for block in blocks[::2]}
    free = [
        i
        for i in range(1, len(blocks), 2)
        if {blocks[i].data_ptr() - nbytes, blocks[i].data_ptr() + nbytes} <= outer
    ]
    addresses = [blocks[i].data_ptr() for i in free]
    for i in reversed(free):
        del blocks[i]
    return blocks + plugs, addresses


@GPU
@pytest.mark.parametrize("y_dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "groups"),
    # Results of a multiple of 512 bytes, what the allocator hands out: the sentinels touch them.
    [((32, 24, 7, 7), 8), ((32, 80, 3, 11), 8), ((2, 384, 19, 9), 16), ((2, 384, 3, 3), 384)],
    ids=str,
)
def test_case_27_nothing_is_written_beside_the_result(shape, groups, y_dtype, monkeypatch):
    x = random_x(shape, BF16, torch.device("cuda"))
    nbytes = x.numel() * y_dtype.itemsize
    assert nbytes % 512 == 0
    for route in ("auto", "two_pass", "three_pass", "fallback"):
        monkeypatch.setenv("GNSILU_ROUTE", route)
        sentinels, slots = slots_between_sentinels(nbytes)
        y = gnsilu.group_norm_silu(x, groups, dtype=y_dtype)
        assert y.data_ptr() in slots
        assert all((block == SENTINEL).all() for block in sentinels)
        assert_exact(y, x, groups)
        del y, sentinels  # or the next result finds a place where one of these was


# --- parameters ----------------------------------------------------------------------------------

PARAMETER_VIEWS = {
    "second_column": lambda v: torch.stack([v, v + 9], 1)[:, 0],
    "a column of an expanded matrix": lambda v: v[:, None].expand(-1, 3)[:, 1],
    "flipped": lambda v: v.flip(0).flip(0),
    "sliced": lambda v: torch.cat([v + 9, v, v - 9])[len(v) : 2 * len(v)],
    "every_third": lambda v: v.repeat_interleave(3)[::3],
    "row of a transposed matrix": lambda v: torch.stack([v - 9, v, v + 9], 1).t()[1],
    "negated": lambda v: torch._neg_view(-v),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", PARAMETER_VIEWS)
def test_case_28_parameters_are_read_by_their_strides(view, dtype, routed_device):
    x = random_x((2, 24, 15, 9), BF16, routed_device)
    weight, bias = (p.to(dtype) for p in random_affine(24, routed_device))
    viewed = [PARAMETER_VIEWS[view](p) for p in (weight, bias)]
    assert all(torch.equal(v, p) for v, p in zip(viewed, (weight, bias), strict=True))
    assert_exact(gnsilu.group_norm_silu(x, 4, *viewed), x, 4, weight, bias)
    want = gnsilu.group_norm_silu(x, 4, weight, bias)
    assert torch.equal(gnsilu.group_norm_silu(x, 4, *viewed), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_28_parameters_expanded_from_one_value(dtype, routed_device):
    x = random_x((2, 24, 15, 9), BF16, routed_device)
    weight, bias = (
        torch.tensor(value, device=routed_device).to(dtype).expand(24) for value in (0.7, -0.2)
    )
    assert weight.stride() == (0,)
    assert_exact(gnsilu.group_norm_silu(x, 4, weight, bias), x, 4, weight, bias)


def test_inputs_are_only_read(device):
    x = random_x((2, 16, 64, 65), BF16, device)
    weight, bias = random_affine(16, device)
    copies = [t.clone() for t in (x, weight, bias)]
    versions = [t._version for t in (x, weight, bias)]
    y = gnsilu.group_norm_silu(x, 4, weight, bias)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert [t._version for t in (x, weight, bias)] == versions
    assert all(torch.equal(a, b) for a, b in zip(copies, (x, weight, bias), strict=True))
