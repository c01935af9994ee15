"""Small calls over odd shapes, checked against FP64, for NVIDIA's compute-sanitizer to watch:

compute-sanitizer --tool memcheck python tests/python/sanitizer_shapes.py
"""

from __future__ import annotations

import gnsilu
import torch
from reference import assert_exact

SPATIAL_SIZES = (1, 2, 3, 7, 31, 33, 49, 127, 1023, 1025, 4097)
CHANNELS_PER_GROUP = (1, 3, 4, 10)
GROUPS = 2


def main() -> None:
    calls = 0
    for dtype in (torch.bfloat16, torch.float16):
        for y_dtype in (dtype, torch.float32):
            for spatial in SPATIAL_SIZES:
                for per_group in CHANNELS_PER_GROUP:
                    channels = GROUPS * per_group
                    numel = 2 * channels * spatial
                    buffer = torch.randn(numel + 1, device="cuda").to(dtype)
                    for offset in (0, 1):  # aligned to 16 bytes, and to 2 only
                        x = buffer[offset : offset + numel].view(2, channels, spatial)
                        weight = torch.randn(channels, device="cuda").to(dtype)
                        y = gnsilu.group_norm_silu(x, GROUPS, weight, weight, 1e-5, y_dtype)
                        assert_exact(y, x, GROUPS, weight, weight)
                        calls += 1
    print(f"{calls} calls checked")


if __name__ == "__main__":
    main()
