"""Sizes at which a 16-bit or 32-bit count overflows, and the shapes of an image decoder."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from inputs import BF16, HALVES, random_x
from reference import assert_exact, same_bits
from torch import Tensor

ROUTES = ["auto", "fallback"]  # auto: two_pass, resident or whole_groups by the size of a group


def normal_on_gpu(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
    """As random_x, made where it is wanted."""
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, device="cuda").mul_(2).add_(0.3)


def need_gpu_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory: {free} here")


def assert_every_copy_is_exact(y: Tensor, tile: Tensor, copies: int, groups: int) -> None:
    """y is the result for copies of a tile, one after the other in dimension 2.

    Their mean and variance are the tile's, so one reference serves them all. Channels and samples
    differ, and so does a place that is a power of two away: a wrong offset shows.
    """
    first = y.narrow(2, 0, tile.shape[2])
    assert_exact(first, tile, groups)
    copied = y.unflatten(2, (copies, tile.shape[2]))
    assert torch.equal(copied, first.unsqueeze(2).expand_as(copied))


def repeated(tile: Tensor, copies: int) -> Tensor:
    return tile.repeat(1, 1, copies, *[1] * (tile.dim() - 3))


# --- more than 32 bits count --------------------------------------------------------------------

# Tile, copies of it, groups, GiB that two_pass and the fallback need.
BEYOND_2_31 = {
    "2^31": ((1, 128, 64, 4096), 64, 32, (14, 14)),
    "just above 2^31": ((1, 128, 17, 4096), 241, 32, (14, 14)),
    "a sample that begins above 2^31": ((2, 128, 17, 4096), 241, 32, (26, 26)),
    "a group above 2^31": ((1, 2, 17, 65536), 964, 1, (14, 32)),
    "a group just below 2^32": ((1, 2, 17, 65536), 1927, 1, (26, 60)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", BEYOND_2_31)
def test_case_14_from_2_31_elements_on(name, route, monkeypatch):
    shape, copies, groups, gib = BEYOND_2_31[name]
    need_gpu_memory(gib[ROUTES.index(route)])
    monkeypatch.setenv("GNSILU_ROUTE", route)
    tile = normal_on_gpu(shape)
    x = repeated(tile, copies)
    assert x.numel() >= 2**31
    assert_every_copy_is_exact(gnsilu.group_norm_silu(x, groups), tile, copies, groups)


@pytest.mark.gpu
def test_case_14_a_group_of_2_32_elements_takes_the_fallback():
    need_gpu_memory(60)
    tile = normal_on_gpu((1, 2, 17, 65536))
    x = repeated(tile, 1928)
    explanation = gnsilu.explain(x, 1)
    assert (explanation.route, explanation.reason) == (
        "fallback",
        "a group has 2^32 elements or more",
    )
    assert_every_copy_is_exact(gnsilu.group_norm_silu(x, 1), tile, 1928, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_case_14_the_last_sample_equals_itself_alone(route, monkeypatch):
    need_gpu_memory(16)
    monkeypatch.setenv("GNSILU_ROUTE", route)
    x = normal_on_gpu((5, 512, 1024, 1024))
    y = gnsilu.group_norm_silu(x, 32)
    assert same_bits(y[4:], gnsilu.group_norm_silu(x[4:].clone(), 32))
    for first in (0, 496):
        channels = slice(first, first + 16)
        assert_exact(y[4:, channels], x[4:, channels], 1)


# --- more than 16 bits count --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((128, 512, 8, 8), 32),
        ((65536, 32, 2, 2), 1),
        ((65536, 32, 2, 2), 32),
        ((200000, 32, 2, 2), 32),
        ((65535, 1, 3, 3), 1),
        ((65537, 2, 1, 1), 1),
        ((2, 65536, 3, 3), 65536),
        ((1, 65537, 7, 5), 65537),
        ((70000, 1, 65, 64), 1),  # of two spans
        ((1, 70000, 65, 64), 70000),
    ],
    ids=str,
)
def test_case_15_many_samples_channels_and_groups(shape, groups, route, monkeypatch):
    need_gpu_memory(10)
    monkeypatch.setenv("GNSILU_ROUTE", route)
    x = normal_on_gpu(shape)
    assert_exact(gnsilu.group_norm_silu(x, groups), x, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["two_pass", "three_pass"])
def test_more_partial_results_than_the_workspace_holds(route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    x = normal_on_gpu((16, 512, 65, 64))  # 16 * 512 groups of nine spans
    assert 0.99 * 2**20 < gnsilu.explain(x, 512).workspace_bytes <= 2**20
    y = gnsilu.group_norm_silu(x, 512)
    assert_exact(y, x, 512)
    assert same_bits(y[15:], gnsilu.group_norm_silu(x[15:].contiguous(), 512))


# --- decoders -----------------------------------------------------------------------------------

# The norms of Stable Diffusion's decoder: channels, and by how much the map is smaller than the
# image. Each block's first norm still sees the channels of the block before it.
DECODER = [(512, 8), (512, 4), (512, 2), (256, 2), (256, 1), (128, 1)]
IMAGES = [(512, 512), (1024, 1024), (720, 1280), (1536, 1536), (2048, 2048)]
# Of tiled decoding, and of encoders, whose maps are odd at any level.
TILES = [(264, 376), (65, 97), (509, 515), (333, 511)]


def decoder_shapes(height: int, width: int) -> list[tuple[int, int, int, int]]:
    return [(1, channels, height // level, width // level) for channels, level in DECODER]


@pytest.mark.gpu
@pytest.mark.parametrize("image", IMAGES, ids=str)
def test_case_19_every_shape_of_a_decoder(image):
    for shape in decoder_shapes(*image):
        need_gpu_memory(14)
        x = normal_on_gpu(shape)
        assert_exact(gnsilu.group_norm_silu(x, 32, eps=1e-6), x, 32, eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_case_19_tiles_of_odd_size(tile, route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    for shape in decoder_shapes(*tile):
        for dtype in HALVES:
            x = normal_on_gpu(shape, dtype)
            assert_exact(gnsilu.group_norm_silu(x, 32, eps=1e-6), x, 32, eps=1e-6)


def test_case_24_a_video(routed_device):
    frame = random_x((1, 128, 1, 256, 256), BF16, routed_device)
    y = gnsilu.group_norm_silu(repeated(frame, 20), 32)
    assert_every_copy_is_exact(y, frame, 20, 32)
