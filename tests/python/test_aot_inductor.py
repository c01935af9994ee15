"""Models that AOTInductor compiled ahead of time, run from Python and from C++."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from inputs import random_x
from programs import run_program, save_tensors
from reference import same_bits

SIZES = ((2, 32, 12, 10), (3, 32, 7, 33), (5, 32, 64, 65))


@pytest.fixture
def norm(device):
    return gnsilu.GroupNormSiLU(8, 32, eps=1e-6).to(device, torch.bfloat16).eval()


@pytest.fixture
def package(norm, device, tmp_path):
    """The norm with dynamic batch and sizes, as a file."""
    sizes = {i: torch.export.Dim(f"size{i}", min=2, max=512) for i in (0, 2, 3)}
    with torch.no_grad():
        x = random_x(SIZES[0], torch.bfloat16, device)
        program = torch.export.export(norm, (x,), dynamic_shapes={"x": sizes})
        path = str(tmp_path / "model.pt2")
        return torch._inductor.aoti_compile_and_package(program, package_path=path)


def test_case_34_a_package_gives_the_eager_bits(norm, package, device, tmp_path):
    """In Python and in a C++ program: compiling takes longest."""
    model = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for size in SIZES:
            x = random_x(size, torch.bfloat16, device)
            assert same_bits(model(x), norm(x))
        save_tensors(tmp_path, x=x, want=norm(x))
    run_program("aoti_program", package, tmp_path / "x.pt", tmp_path / "want.pt")
