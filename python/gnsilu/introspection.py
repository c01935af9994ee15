"""What a call would do, and what this build is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from gnsilu import _C
from gnsilu.functional import _normalised
from gnsilu.library import built_for


@dataclass(frozen=True)
class LaunchConfig:
    """The launch configuration of a tuned route. It changes the speed and never the result."""

    threads: int
    """Threads a block."""
    vectors_in_flight: int
    """Vectors of 8 elements that a lane loads before it uses the first."""

    def __str__(self) -> str:
        return f"{self.threads} threads a block, {self.vectors_in_flight} vectors in flight"


@dataclass(frozen=True)
class Explanation:
    """How :func:`gnsilu.group_norm_silu` would compute a call."""

    route: str
    """``"fallback"`` (PyTorch's operators), or CUDA kernels: ``"resident"`` or ``"ring"``,
    which read x once, ``"two_pass"`` or ``"three_pass"``."""
    reason: str
    """Why this route."""
    config: LaunchConfig | None
    """None where the route has a single configuration."""
    bytes_per_element: float
    """Moved through the GPU's memory, reads and writes together."""
    workspace_bytes: int
    """Allocated beside the result by a fused route. (The fallback allocates wide copies of
    slices.)"""

    def __str__(self) -> str:
        config = f"; {self.config}" if self.config else ""
        return (
            f"{self.route}: {self.reason}{config}; {self.bytes_per_element:g} bytes an element; "
            f"{self.workspace_bytes / 1024:.1f} KiB of workspace"
        )


@dataclass(frozen=True)
class BuildInfo:
    """With what and for what the libraries were built."""

    version: str
    torch: str
    cuda: str
    """Version of the CUDA toolkit; empty where the build is for the CPU only."""
    architectures: tuple[str, ...]
    """What the CUDA kernels were compiled for; empty where the build is for the CPU only."""
    compiler: str

    def __str__(self) -> str:
        cuda = (
            f"CUDA {self.cuda} for {', '.join(self.architectures)}"
            if self.cuda
            else "without CUDA kernels (CPU only)"
        )
        return f"gnsilu {self.version}, torch {self.torch}, {cuda}, {self.compiler}"


def explain(
    x: Tensor,
    num_groups: SupportsIndex | SupportsFloat,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat = 1e-5,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """The route that :func:`gnsilu.group_norm_silu` takes with these arguments, and its cost.

    Launches and tunes nothing; raises what the call itself would raise.
    """
    arguments = _normalised(x, num_groups, weight, bias, eps, dtype)
    facts = json.loads(torch.ops.gnsilu.explain(x, *arguments))
    config = facts.pop("config")
    return Explanation(config=LaunchConfig(**config) if config else None, **facts)


def build_info() -> BuildInfo:
    """With what and for what this build of gnsilu was made."""
    return BuildInfo(
        version=_C.version,
        torch=built_for(),
        cuda=_C.cuda_version,
        architectures=tuple(_C.architectures),
        compiler=_C.compiler,
    )
