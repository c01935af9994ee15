"""Strides, memory formats, alignment: what is read and written, and nothing else."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from reference import assert_exact

BF16 = torch.bfloat16


def meta_strides(x: torch.Tensor, groups: int) -> tuple[int, ...]:
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.ops.gnsilu.group_norm_silu(meta, groups).stride()


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every_second_channel": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every_second_column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded_height": lambda x: x[:, :, :1].expand_as(x),
    "expanded_batch": lambda x: x[:1].expand_as(x),
    "slice_of_channels": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, samples, device):
    x = torch.randn(samples, 32, 24, 20, device=device).to(BF16)
    strided = LAYOUTS[layout](x)
    y = gnsilu.group_norm_silu(strided, 8)
    assert_exact(y, strided, 8)
    assert y.stride() == meta_strides(strided, 8)
    if layout == "channels_last":
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_3d(device):
    x = torch.randn(2, 16, 3, 6, 5, device=device).to(BF16)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    y = gnsilu.group_norm_silu(x, 4)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert_exact(y, x, 4)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((64, 384, 1, 1), (384, 1, 786432, 1)),
        ((1, 32, 4, 4), (7, 16, 4, 1)),
        ((2, 1, 5, 6), (30, 1, 6, 1)),
        ((2, 32, 1, 1), (32, 1, 32, 32)),
    ],
)
def test_ambiguous_strides(shape, strides, device):
    # The strides of dimensions of size 1 say nothing: the memory needed is that of the others.
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    x = torch.randn(size, device=device).to(BF16).as_strided(shape, strides)
    y = gnsilu.group_norm_silu(x, 1)
    assert_exact(y, x, 1)
    assert y.stride() == meta_strides(x, 1)


PARAMETER_VIEWS = {
    "second_column": lambda v: torch.stack([v, v + 9], 1)[:, 0],
    "flipped": lambda v: v.flip(0).flip(0),
    "sliced": lambda v: torch.cat([v + 9, v])[len(v) :],
    "every_third": lambda v: v.repeat_interleave(3)[::3],
    "odd_offset": lambda v: torch.cat([v[:1], v])[1:],
}


@pytest.mark.parametrize("view", PARAMETER_VIEWS)
def test_parameters_are_read_by_their_strides(view, device):
    x = torch.randn(2, 24, 15, 9, device=device).to(BF16)
    values = torch.randn(24, device=device)
    for dtype in (torch.float32, BF16):
        weight = PARAMETER_VIEWS[view](values.to(dtype))
        y = gnsilu.group_norm_silu(x, 4, weight, weight)
        assert torch.equal(y, gnsilu.group_norm_silu(x, 4, values.to(dtype), values.to(dtype)))


def test_expanded_parameter(device):
    x = torch.randn(2, 24, 15, 9, device=device).to(BF16)
    weight = torch.tensor([0.7], device=device).expand(24)
    full = torch.full((24,), 0.7, device=device)
    y = gnsilu.group_norm_silu(x, 4, weight)
    assert torch.equal(y, gnsilu.group_norm_silu(x, 4, full))


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 6, 5, 7), (2, 3, 71, 65), (1, 16, 64, 64)])
@pytest.mark.parametrize("y_dtype", [BF16, torch.float32])
def test_x_at_any_offset_of_a_buffer(shape, y_dtype, device):
    numel = torch.Size(shape).numel()
    values = torch.randn(numel, device=device).to(BF16)
    want = None
    for offset in range(16):
        buffer = torch.full((numel + 32,), float("nan"), dtype=BF16, device=device)
        x = buffer[offset : offset + numel].view(shape)
        x.view(-1).copy_(values)
        before = buffer.clone()
        y = gnsilu.group_norm_silu(x, shape[1] // 2 if shape[1] % 2 == 0 else 1, dtype=y_dtype)
        want = y if want is None else want
        assert torch.equal(y, want)  # alignment changes no bit; a NaN from outside would show
        assert torch.equal(buffer.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("spatial", [1, 2, 3, 7, 31, 33, 49, 127, 1023, 1025, 4097, 6141])
@pytest.mark.parametrize("per_group", [1, 3, 4, 10])
def test_groups_do_not_touch_their_neighbours(spatial, per_group, device):
    groups = 3
    x = torch.randn(2, groups * per_group, spatial, device=device).to(BF16)
    x[:, per_group : 2 * per_group] = float("nan")
    y = gnsilu.group_norm_silu(x, groups)
    assert y[:, per_group : 2 * per_group].isnan().all()
    for outer in (slice(0, per_group), slice(2 * per_group, None)):
        assert_exact(y[:, outer].contiguous(), x[:, outer].contiguous(), 1)


def test_inputs_are_only_read(device):
    x = torch.randn(2, 16, 64, 65, device=device).to(BF16)
    weight, bias = torch.randn(16, device=device), torch.randn(16, device=device)
    copies = [t.clone() for t in (x, weight, bias)]
    versions = [t._version for t in (x, weight, bias)]
    y = gnsilu.group_norm_silu(x, 4, weight, bias)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert [t._version for t in (x, weight, bias)] == versions
    assert all(torch.equal(a, b) for a, b in zip(copies, (x, weight, bias), strict=True))
