"""The C++ programs of tests/cpp, how tensors reach them, and the kernels' library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gnsilu
import pytest
import torch
from gpu_test import library_folders
from torch import Tensor

KERNELS = Path(gnsilu.__file__).parent / "lib" / "libgnsilu_kernels.so"


class Holder(torch.nn.Module):
    """Carries a tensor in TorchScript's format."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x


def save_tensors(folder: Path, **tensors: Tensor) -> None:
    """Each as folder/name.pt, for a program to load."""
    for name, tensor in tensors.items():
        torch.jit.script(Holder(tensor)).save(str(folder / f"{name}.pt"))


def run_program(name: str, *arguments: str | Path) -> None:
    """Runs a built program, which fails where it ends with another status than 0."""
    folder = os.environ.get("GNSILU_CPP_TESTS")
    program = Path(folder) / name if folder else None
    if program is None or not program.exists():
        pytest.skip("GNSILU_CPP_TESTS does not name the folder of the built C++ programs")
    environment = os.environ | {"LD_LIBRARY_PATH": library_folders()}
    subprocess.run([program, *arguments], check=True, env=environment, timeout=60)
