"""TorchScript: scripted, traced, saved, frozen; loaded where only the op library is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gnsilu
import pytest
import torch
from torch import Tensor

BF16 = torch.bfloat16


class Scripted(torch.nn.Module):
    """Calls the op in every way that TorchScript code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> list[Tensor]:
        op = torch.ops.gnsilu.group_norm_silu
        return [
            op(x, 4, self.weight, self.bias, 1e-6, torch.float16),
            op(x, 4, self.weight, self.bias, 1e-6, None),
            op(x, num_groups=4, weight=self.weight, dtype=x.dtype),
            op(x, 2, bias=self.bias, eps=0.5),
            op(x, 2, None, self.bias),
            torch.ops.gnsilu.group_norm(x, 8),
        ]


class Traced(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gnsilu.group_norm_silu(x, 4, eps=1e-3, dtype=torch.float16)


def example(device: torch.device) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 8, 9, 7, device=device).to(BF16)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("freeze", [False, True])
def test_scripted_module_gives_the_eager_bits(freeze, device):
    module = Scripted().to(device).eval()
    x = example(device)
    with torch.no_grad():
        eager = module(x)
        scripted = torch.jit.script(module)
        if freeze:
            scripted = torch.jit.freeze(scripted)
        for _ in range(3):  # the profiling executor may rewrite the graph
            assert same(scripted(x), eager)


def test_traced_function_gives_the_eager_bits(device):
    x = example(device)
    traced = torch.jit.trace(Traced(), x)
    larger = torch.randn(3, 8, 20, 11, device=device).to(BF16)
    for inputs in (x, larger):
        assert same([traced(inputs)], [Traced()(inputs)])


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_module_can_be_scripted(affine, dtype, device):
    module = gnsilu.GroupNormSiLU(4, 8, affine=affine, dtype=dtype).to(device).eval()
    x = example(device)
    with torch.no_grad():
        assert same([torch.jit.script(module)(x)], [module(x)])


LOADER = """
import sys, torch
torch.ops.load_library(sys.argv[1])
assert "gnsilu" not in sys.modules
module = torch.jit.load(sys.argv[2])
with torch.no_grad():
    y = module(torch.load(sys.argv[3]))
torch.save(y, sys.argv[4])
"""


def test_saved_module_runs_where_only_the_op_library_is_loaded(tmp_path, device):
    module = Scripted().to(device).eval()
    x = example(device)
    torch.jit.script(module).save(str(tmp_path / "module.pt"))
    torch.save(x, tmp_path / "x.pt")
    files = [str(tmp_path / name) for name in ("module.pt", "x.pt", "y.pt")]
    command = [sys.executable, "-c", LOADER, gnsilu.library_path(), *files]
    subprocess.run(command, check=True, cwd=tmp_path)
    with torch.no_grad():
        assert same(torch.load(tmp_path / "y.pt"), module(x))


class Holder(torch.nn.Module):
    """Carries a tensor to a C++ program in TorchScript's format."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_saved_module_runs_in_a_cpp_program(tmp_path):
    folder = os.environ.get("GNSILU_CPP_TESTS")
    program = Path(folder) / "op_program" if folder else None
    if program is None or not program.exists():
        pytest.skip("GNSILU_CPP_TESTS does not name the folder of the built C++ programs")
    module = gnsilu.GroupNormSiLU(4, 8, dtype=torch.float16).eval()
    x = example(torch.device("cpu"))
    torch.jit.script(module).save(str(tmp_path / "module.pt"))
    with torch.no_grad():
        for name, tensor in (("x.pt", x), ("want.pt", module(x))):
            torch.jit.script(Holder(tensor)).save(str(tmp_path / name))
    files = [str(tmp_path / name) for name in ("module.pt", "x.pt", "want.pt")]
    # The program may have been built elsewhere: tell it where the libraries lie.
    folders = [Path(torch.__file__).parent / "lib", Path(gnsilu.library_path()).parent]
    libraries = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    subprocess.run([str(program), *files], check=True, env=os.environ | libraries)
