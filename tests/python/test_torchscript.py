"""TorchScript: scripted, traced, saved, frozen; loaded where only the op library is loaded."""

from __future__ import annotations

import functools

import gnsilu
import pytest
import torch
from inputs import BF16, random_x
from processes import run_python
from programs import run_program, save_tensors
from reference import assert_exact
from torch import Tensor


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
    return random_x((2, 8, 9, 7), BF16, device)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_case_35_every_form_of_the_call_is_exact(device):
    module = Scripted().to(device)
    x, w, b = example(device), module.weight, module.bias
    wanted = [
        (torch.float16, (4, w, b, 1e-6)),
        (BF16, (4, w, b, 1e-6)),
        (BF16, (4, w)),
        (BF16, (2, None, b, 0.5)),
        (BF16, (2, None, b)),
        (BF16, (8, None, None, 1e-5, False)),
    ]
    with torch.no_grad():
        results = torch.jit.script(module)(x)
    for y, (dtype, arguments) in zip(results, wanted, strict=True):
        assert y.dtype == dtype
        assert_exact(y, x, *arguments)


@pytest.mark.parametrize("freeze", [False, True])
def test_case_35_scripted_module_gives_the_eager_bits(freeze, routed_device):
    module = Scripted().to(routed_device).eval()
    x = example(routed_device)
    with torch.no_grad():
        eager = module(x)
        scripted = torch.jit.script(module)
        if freeze:
            scripted = torch.jit.freeze(scripted)
        for _ in range(3):  # the profiling executor may rewrite the graph
            assert same(scripted(x), eager)


def test_case_35_traced_function_gives_the_eager_bits(routed_device):
    x = example(routed_device)
    traced = torch.jit.trace(Traced(), x)
    larger = random_x((3, 8, 20, 61), BF16, routed_device)
    for inputs in (x, larger):
        assert same([traced(inputs)], [Traced()(inputs)])


@pytest.mark.parametrize("dtype", [None, torch.float16, BF16])
@pytest.mark.parametrize("affine", [True, False])
def test_case_35_module(affine, dtype, device):
    module = gnsilu.GroupNormSiLU(4, 8, affine=affine, dtype=dtype).to(device).eval()
    x = example(device)
    with torch.no_grad():
        for make in (torch.jit.script, functools.partial(torch.jit.trace, example_inputs=x)):
            assert same([make(module)(x)], [module(x)])


LOADER = """
import sys, torch
torch.ops.load_library({library!r})
x = torch.load("x.pt")
with torch.no_grad():
    results = [torch.jit.load(name)(x) for name in {names}]
assert "gnsilu" not in sys.modules
torch.save(results, "results.pt")
"""


def test_case_35_saved_modules_run_where_only_the_op_library_is_loaded(tmp_path, device):
    x = example(device)
    scripted, traced = Scripted().to(device).eval(), Traced().to(device)
    module = gnsilu.GroupNormSiLU(4, 8, dtype=torch.float16).to(device).eval()
    with torch.no_grad():
        want = [scripted(x), scripted(x), traced(x), module(x)]
        saved = {
            "scripted.pt": torch.jit.script(scripted),
            "frozen.pt": torch.jit.freeze(torch.jit.script(scripted)),
            "traced.pt": torch.jit.trace(traced, x),
            "module.pt": torch.jit.script(module),
        }
    for name, program in saved.items():
        program.save(str(tmp_path / name))
    torch.save(x, tmp_path / "x.pt")
    done = run_python(
        LOADER.format(library=gnsilu.library_path(), names=list(saved)), cwd=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    for y, wanted in zip(torch.load(tmp_path / "results.pt"), want, strict=True):
        assert same(y, wanted) if isinstance(wanted, list) else same([y], [wanted])


def test_case_35_saved_module_runs_in_a_cpp_program(tmp_path):
    module = gnsilu.GroupNormSiLU(4, 8, dtype=torch.float16).eval()
    x = example(torch.device("cpu"))
    torch.jit.script(module).save(str(tmp_path / "module.pt"))
    with torch.no_grad():
        save_tensors(tmp_path, x=x, want=module(x))
    run_program("op_program", *(tmp_path / name for name in ("module.pt", "x.pt", "want.pt")))
