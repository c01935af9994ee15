"""Small calls over odd shapes for NVIDIA's compute-sanitizer to watch. The checks against FP64 run
on the CPU, so that the checker has our kernels alone to follow:

compute-sanitizer --tool memcheck python tests/python/sanitizer_shapes.py
"""

from __future__ import annotations

import itertools

import gnsilu
import torch
from reference import assert_exact

SPATIAL_SIZES = (1, 2, 3, 7, 31, 33, 49, 127, 1023, 1025, 4097)
CHANNELS_PER_GROUP = (1, 3, 4, 10)
GROUPS = 2


def main() -> None:
    calls = 0
    for dtype, y_dtype in itertools.product(
        (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32)
    ):
        for spatial, per_group in itertools.product(SPATIAL_SIZES, CHANNELS_PER_GROUP):
            channels = GROUPS * per_group
            shape = (2, channels, spatial)
            x = torch.randn(shape).to(dtype)
            weight = torch.randn(channels).to(dtype)
            for offset in (0, 1):  # aligned to 16 bytes, and to 2 only
                buffer = torch.cat([x.new_zeros(offset), x.view(-1)]).cuda()
                on_gpu = weight.cuda()
                y = gnsilu.group_norm_silu(
                    buffer[offset:].view(shape), GROUPS, on_gpu, on_gpu, 1e-5, y_dtype
                )
                assert_exact(y.cpu(), x, GROUPS, weight, weight)
                calls += 1
    print(f"{calls} calls checked")


if __name__ == "__main__":
    main()
