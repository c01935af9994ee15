"""Models that AOTInductor compiled ahead of time, run from Python and from C++."""

from __future__ import annotations

import functools
import tempfile

import gnsilu
import pytest
import torch
from inputs import random_x
from processes import run_python
from programs import run_program, save_tensors

SIZES = ((2, 32, 12, 10), (3, 32, 7, 33), (5, 32, 64, 65))

RUN = """
import torch, gnsilu
model = torch._inductor.aoti_load_package({package!r})
with torch.no_grad():
    for x, want in torch.load({tensors!r}):
        assert torch.equal(model(x).view(torch.int16), want.view(torch.int16)), x.shape
"""


def package_of(model, x, dynamic_shapes, path) -> str:
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=dynamic_shapes)
        return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@functools.cache
def packages_load() -> bool:
    """Whether this machine's compiler makes packages that can be loaded, gnsilu aside."""
    with tempfile.TemporaryDirectory() as folder:
        package = package_of(torch.nn.SiLU(), torch.ones(8), None, f"{folder}/silu.pt2")
        load = f"import torch; torch._inductor.aoti_load_package({package!r})"
        return run_python(load).returncode == 0


def test_case_34_a_package_gives_the_eager_bits(device, tmp_path):
    """In Python and in a C++ program: compiling takes longest. With dynamic batch and sizes."""
    norm = gnsilu.GroupNormSiLU(8, 32, eps=1e-6).to(device, torch.bfloat16).eval()
    xs = [random_x(size, torch.bfloat16, device) for size in SIZES]
    sizes = {i: torch.export.Dim(f"size{i}", min=2, max=512) for i in (0, 2, 3)}
    package = package_of(norm, xs[0], {"x": sizes}, tmp_path / "model.pt2")
    with torch.no_grad():
        tensors = [(x, norm(x)) for x in xs]
    torch.save(tensors, tmp_path / "tensors.pt")
    # In a process of its own: some compilers link libstdc++ into the package in a way that ends the
    # process that loads it.
    done = run_python(RUN.format(package=package, tensors=str(tmp_path / "tensors.pt")))
    if done.returncode < 0 and not packages_load():
        pytest.skip("no package that AOTInductor makes here can be loaded, torch.nn.SiLU's neither")
    assert done.returncode == 0, done.stderr
    x, want = tensors[-1]
    save_tensors(tmp_path, x=x, want=want)
    run_program("aoti_program", package, tmp_path / "x.pt", tmp_path / "want.pt")
