"""silu(group_norm(x)) in one exact, fused operator for PyTorch.

>>> import gnsilu
>>> y = gnsilu.group_norm_silu(x, 32, weight, bias, 1e-6, torch.bfloat16)

The operators are ``torch.ops.gnsilu.group_norm_silu`` and ``torch.ops.gnsilu.group_norm``.
Importing this package loads them and initialises no CUDA.
"""

from gnsilu.library import cmake_prefix_path, library_path, load_library

load_library()

# After the library, which these need.
from gnsilu.functional import group_norm, group_norm_silu  # noqa: E402
from gnsilu.introspection import (  # noqa: E402
    BuildInfo,
    Explanation,
    LaunchConfig,
    build_info,
    explain,
)
from gnsilu.module import GroupNormSiLU  # noqa: E402
from gnsilu.patching import PatchReport, Site, patch, unpatch  # noqa: E402

__version__ = build_info().version

__all__ = [
    "BuildInfo",
    "Explanation",
    "GroupNormSiLU",
    "LaunchConfig",
    "PatchReport",
    "Site",
    "build_info",
    "cmake_prefix_path",
    "explain",
    "group_norm",
    "group_norm_silu",
    "library_path",
    "patch",
    "unpatch",
]
