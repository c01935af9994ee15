"""Patched modules under torch.compile, TorchScript, torch.export, torch.fx and autocast."""

from __future__ import annotations

import io

import gnsilu
import patch_models as models
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

X = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(1))


class Scriptable(nn.Module):
    """What TorchScript takes: type comments, settings, children without parameters."""

    def __init__(self, affine: bool = True):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4, eps=0.5, affine=affine)
        self.act = nn.SiLU()
        self.out = nn.Sequential(nn.GroupNorm(4, 4), nn.SiLU(), nn.Conv2d(4, 4, 1))
        self.scale: float = 2.0

    def forward(self, x, factors):
        # type: (Tensor, List[float]) -> Tensor
        for factor in factors:
            x = x * factor
        if len(factors) > 1:  # noqa: SIM108
            h = self.norm(x)
        else:
            h = x
        h = self.act(h)
        return self.out(h * self.scale)


def patched(model: nn.Module) -> tuple[nn.Module, Tensor]:
    """A patched model, and the result that it had before."""
    wanted = model(X)
    assert gnsilu.patch(model).fused
    return model, wanted


class Prepared(nn.Sequential):
    """Scripted without what is for training only."""

    def __prepare_scriptable__(self):
        return nn.Sequential(self[0], self[1])


def test_a_hook_for_scripting_is_called():
    model = Prepared(nn.GroupNorm(2, 4), nn.SiLU(), nn.Dropout(0.5))
    wanted = torch.jit.script(model)(X)
    assert gnsilu.patch(model).fused == ("0",)
    torch.testing.assert_close(torch.jit.script(model)(X), wanted)


def replace_activation(model):
    model[1] = nn.ReLU()


def doubled(self, x, y):
    # type: (Tuple[Tensor], Tensor) -> Tensor
    return 2 * y


def hook_the_norm(model):
    model[0].register_forward_hook(doubled)


def lengthen(model):
    model.append(nn.ReLU())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace_activation, "Sequential: 1 changed"),
        (hook_the_norm, "Sequential: 0 changed"),
        (lengthen, "Sequential: number of children changed"),
    ],
)
def test_what_changed_since_is_not_scripted(change, what):
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()))
    gnsilu.patch(model)
    change(model[1])
    with pytest.raises(RuntimeError, match=what):
        torch.jit.script(model)
    gnsilu.patch(model)
    torch.testing.assert_close(torch.jit.script(model)(X), model(X))


@pytest.mark.parametrize("affine", [True, False])
def test_scripted(affine):
    model = Scriptable(affine).eval()
    wanted = [model(X, factors) for factors in ([], [2.0, 3.0])]
    assert gnsilu.patch(model).fused == ("norm", "out.0")
    scripted = torch.jit.script(model)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    with torch.no_grad():
        for module in (scripted, torch.jit.load(buffer), torch.jit.freeze(scripted)):
            results = [module(X, factors) for factors in ([], [2.0, 3.0])]
            torch.testing.assert_close(results, wanted, rtol=1e-5, atol=1e-5)
    assert str(scripted.inlined_graph).count("gnsilu::group_norm_silu") == 2
    assert "aten::group_norm" not in str(scripted.inlined_graph)
    gnsilu.unpatch(model)
    assert "gnsilu::" not in str(torch.jit.script(model).inlined_graph)


def test_traced():
    model, wanted = patched(models.Nested())
    traced = torch.jit.trace(model, X)
    assert str(traced.inlined_graph).count("gnsilu::group_norm_silu") == 2
    torch.testing.assert_close(traced(X), wanted)
    other = torch.randn(1, 4, 2, 9)
    assert torch.equal(traced(other), model(other))


@pytest.mark.parametrize(
    ("make", "dynamic"), [(models.SharedActivation, False), (Scriptable, True)]
)
def test_compiled_without_a_graph_break(make, dynamic):
    arguments = (X, [0.5, 2.0]) if make is Scriptable else (X,)
    model = make()
    wanted = model(*arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*arguments), wanted)
    gnsilu.patch(model)  # noticed by what was compiled before, too
    operators = []

    def backend(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    assert torch.compile(model, backend=backend, fullgraph=True)(*arguments).shape == X.shape
    assert sum("gnsilu.group_norm_silu" in operator for operator in operators) == 2
    torch.testing.assert_close(compiled(*arguments), wanted)
    gradient = torch.autograd.grad(compiled(*arguments).sum(), model.norm.weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), model.norm.weight))


def test_compiled_model_can_be_patched():
    model = models.Nested()
    wanted = model(X)
    compiled = torch.compile(model, backend="eager")
    assert gnsilu.patch(compiled).fused == ("_orig_mod.norm", "_orig_mod.norm2")
    torch.testing.assert_close(compiled(X), wanted)
    gnsilu.unpatch(compiled)
    assert type(model) is models.Nested


def test_exported():
    model, wanted = patched(models.Nested())
    exported = torch.export.export(model, (X,))
    assert str(exported.graph).count("gnsilu.group_norm_silu") == 2
    torch.testing.assert_close(exported.module()(X), wanted)


def test_symbolic_trace_keeps_the_call_whole():
    model, wanted = patched(models.Nested())
    traced = torch.fx.symbolic_trace(model)
    assert [n.target.__name__ for n in traced.graph.nodes if n.op == "call_function"] == [
        "_fused", "_fused"
    ]  # fmt: skip
    torch.testing.assert_close(traced(X), wanted)
    plain = torch.fx.symbolic_trace(models.Nested())  # its forward is generated source
    assert gnsilu.patch(plain).fused == ("norm", "norm2")
    assert plain(X).shape == X.shape


def test_scripted_child_is_passed_over():
    model = nn.Sequential(torch.jit.script(Scriptable().out), nn.GroupNorm(2, 4), nn.SiLU())
    model, wanted = patched(model)
    torch.testing.assert_close(model(X), wanted)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_a_cpu_leaves_types_as_they_were(x_dtype, dtype):
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    with torch.autocast("cpu", dtype), torch.no_grad():
        wanted = model(X.to(x_dtype))
        gnsilu.patch(model)
        y = model(X.to(x_dtype))
    assert y.dtype == wanted.dtype == x_dtype
    torch.testing.assert_close(
        y, wanted, rtol=1e-5 if x_dtype == torch.float32 else 2e-2, atol=0.02
    )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_on_a_gpu_rounds_once(half):
    """By fake tensors: the types are those of a GPU, without one."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        model = nn.Sequential(nn.GroupNorm(2, 4, device="cuda"), nn.SiLU())
        model.requires_grad_(False)  # autograd of torch 2.8 would ask the GPU for its stream
        x = torch.empty(2, 4, 3, device="cuda")
        gnsilu.patch(model)
        try:
            assert model(x.half()).dtype == torch.float16
            assert model(x.bfloat16()).dtype == torch.bfloat16
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", half)
            assert model(x.half()).dtype == model(x.bfloat16()).dtype == half
            assert model(x).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.gpu
def test_autocast_on_a_gpu():
    model, x = models.Nested().cuda(), X.cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        wanted = model(x)
        gnsilu.patch(model)
        seen = []
        model.conv.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
        torch.testing.assert_close(model(x), wanted, rtol=0.03, atol=0.03)
        assert seen[0].dtype == torch.float32
        model(x.bfloat16())
    assert seen[2].dtype == torch.bfloat16
    wanted = gnsilu.group_norm_silu(x.bfloat16(), 2, model.norm.weight, model.norm.bias)
    assert torch.equal(seen[2], wanted)
