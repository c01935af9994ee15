"""Small calls over odd shapes, on every route, for NVIDIA's compute-sanitizer to watch.

The checks against FP64 run on the CPU, so that the checker has the op's kernels alone to follow:

compute-sanitizer --tool memcheck python tests/python/sanitizer_shapes.py [ROUTE...]
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator

import gnsilu
import torch
from reference import assert_exact
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
Y_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Rows that begin at every alignment; groups of one span of 4096 elements and of several.
SPATIAL_SIZES = (1, 2, 3, 7, 31, 33, 49, 127, 200, 1000, 1023, 1025, 4097, 6141)
CHANNELS_PER_GROUP = (1, 3, 4, 5, 6, 7, 10, 12, 20, 24, 30)
GROUPS = 2

# 5 is prime to the numbers of shapes, so that all of them come up with some channels. The
# fallback's kernels are PyTorch's: a few calls show that they are called with care.
EVERY_NTH = {"resident": 1, "two_pass": 5, "three_pass": 5, "fallback": 29}
# For the ring, whose groups are large: tiles of one row, of two, of many; a last tile cut short.
RING_SHAPES = ((1, 2, 262144 + 8), (2, 6, 90008), (1, 16, 35001), (1, 24, 22222))


def at_offset(values: Tensor, offset: int) -> Tensor:
    """On the GPU, contiguous, in memory that ends with it and begins `offset` elements before."""
    buffer = torch.cat([values.new_zeros(offset), values.reshape(-1)]).cuda()
    return buffer[offset:].view(values.shape)


def calls(every_nth: int) -> Iterator[None]:
    kinds = itertools.product(HALVES, CHANNELS_PER_GROUP, SPATIAL_SIZES)
    for number, (dtype, per_group, spatial) in enumerate(kinds):
        if number % every_nth:
            continue
        channels = GROUPS * per_group
        x = torch.randn(2, channels, spatial).to(dtype)
        weight = torch.randn(channels).to(HALVES[number % 2])
        bias = torch.randn(channels)
        y_dtype = Y_DTYPES[number % 3]
        for offset in (0, 1 + number % 7):  # aligned to 16 bytes, and to 2 only
            y = gnsilu.group_norm_silu(
                at_offset(x, offset),
                GROUPS,
                at_offset(weight, number % 3),
                at_offset(bias, number % 5),
                1e-5,
                y_dtype,
            )
            assert_exact(y.cpu(), x, GROUPS, weight, bias)
            yield


def ring_calls() -> Iterator[None]:
    for dtype, y_dtype in itertools.product(HALVES, Y_DTYPES):
        for shape in RING_SHAPES:
            x = torch.randn(shape).to(dtype)
            weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
            on_gpu = [at_offset(values, 0) for values in (x, weight, bias)]
            y = gnsilu.group_norm_silu(on_gpu[0], GROUPS, *on_gpu[1:], 1e-5, y_dtype)
            assert_exact(y.cpu(), x, GROUPS, weight, bias)
            yield


def main() -> None:
    for route in sys.argv[1:] or [*EVERY_NTH, "ring"]:
        os.environ["GNSILU_ROUTE"] = route
        begin = time.monotonic()
        made = ring_calls() if route == "ring" else calls(EVERY_NTH[route])
        count = sum(1 for _ in made)
        print(f"{route}: {count} calls checked in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
