"""gnsilu.patch on small modules: what is fused, what is not, and that values stay what they are."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re

import gnsilu
import patch_models as models
import pytest
import torch
from torch import nn


def inputs(dtype=torch.float32):
    return torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(model, fused, reasons, *more):
    """The report's contents; the same values before, with and after patching; and the FP32 kernels
    of a fused site are PyTorch's own, so that the tolerance is that of their order of additions."""
    x = inputs()
    model.eval()
    before = model(x.clone(), *more)
    types = {name: (type(m), {*m.__dict__}) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    report = gnsilu.patch(model)
    assert report.fused == fused, str(report)
    found = {site.name: site.reason for site in report.sites if not site.fused}
    assert found.keys() == reasons.keys(), str(report)
    for name, part in reasons.items():
        assert part in found[name], str(report)
    torch.testing.assert_close(model(x.clone(), *more), before, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == keys
    gnsilu.unpatch(model)
    assert types == {name: (type(m), {*m.__dict__}) for name, m in model.named_modules()}
    assert torch.equal(model(x.clone(), *more), before)
    return report


BOTH = ("norm", "norm2")


@pytest.mark.parametrize(
    ("model", "fused", "reasons"),
    [
        (models.Nested(), BOTH, {}),
        (models.Reassigned(), BOTH, {}),
        (models.SharedActivation(act=nn.SiLU(inplace=True)), BOTH, {}),
        (models.Nested(act=nn.functional.silu), BOTH, {}),
        (
            models.Nested(act=nn.GELU()),
            ("norm",),
            {"norm2": "goes to GELU (`self.act(self.norm2("},
        ),
        (
            models.Residual(),
            (),
            {"norm": "`y + h` uses its result, too", "norm2": "SiLU reads its result more than"},
        ),
        (
            models.Between(),
            (),
            {"norm": "goes to Dropout (`self.dropout(h)`), not", "norm2": "used in `h * 2`"},
        ),
        (
            models.Between(dropout=nn.Identity()),
            (),
            {"norm": "goes to Identity (`self.dropout(h)`), not", "norm2": "used in `h * 2`"},
        ),
        (models.SomeBranch(), (), {"norm": "`self.act(y) * h`", "norm2": "`return y`"}),
        (models.EveryBranch(), BOTH, {}),
        (
            models.AnotherValue(),
            ("norm2",),
            {"norm": "`self.act(h)` may get another value instead"},
        ),
        (
            models.Setting(mode="default", extra=False),
            ("norm",),
            {"norm2": "does not reach its call"},
        ),
        (
            models.Setting(mode="default", extra=True),
            ("norm",),
            {"norm2": "in `return self.norm2(h)`"},
        ),
        (
            models.Setting(mode="scale", extra=0),
            (),
            {"norm": "used in `h * 2`", "norm2": "does not reach its call"},
        ),
        (models.Loop(), (), {"norm": "inside a `for` statement", "norm2": "`self.act(h)`"}),
        (
            models.InPlaceInLoop(),
            (),
            {"norm": "`h += 1` uses its result", "norm2": "`g -= 1` uses"},
        ),
        (models.LoopInOneExpression(), BOTH, {}),
        (models.Statements(), (), {"norm": "inside a `with` statement", "norm2": "`self.act(g)`"}),
        (models.Comprehension(), ("norm",), {"norm2": "which a nested scope uses"}),
        (
            models.NestedScope(),
            (),
            {"norm": "which a nested scope uses", "norm2": "used in `(z := "},
        ),
        (models.Called(), ("norm2",), {"norm": "called as `self.norm(input=x)`"}),
        (
            models.CalledWithin(),
            (),
            {"norm": "called as `self.norm(input=x)`", "norm2": "called as `self.norm2(**arg"},
        ),
        (
            models.TwoReaders(),
            (),
            {"norm": "SiLU reads its result more", "norm2": "+ self.norm2(b)`"},
        ),
        (models.Locals(), (), dict.fromkeys(BOTH, "uses locals, which may read any name")),
        (models.Private(), (), dict.fromkeys(BOTH, "uses the private name __seen")),
        (models.Inherited(), (), dict.fromkeys(BOTH, "Inherited.forward does not call it")),
        (models.Super(), ("norm",), {"norm2": "Super.forward does not call it"}),
        (models.Decorated(), BOTH, {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_fused_and_why_not(model, fused, reasons):
    check(model, fused, reasons)


@pytest.mark.parametrize("flag", [0, 1, 2])
def test_branches_on_an_argument_that_all_end_in_silu(flag):
    check(models.EveryBranch(), BOTH, {}, flag)
    check(models.AnotherValue(), ("norm2",), {"norm": "may get another value"}, flag)


def test_settings_are_looked_at_in_each_instance_and_may_change_later():
    a, b = (models.Setting(mode=mode, extra=False) for mode in ("default", "scale"))
    model, x = nn.ModuleList([a, b]), inputs()
    wanted = a(x), b(x)
    assert gnsilu.patch(model).fused == ("0.norm",)
    assert type(b) is models.Setting
    torch.testing.assert_close((a(x), b(x)), wanted)
    a.mode, b.norm, b.norm2 = "scale", a.norm, a.norm2
    assert torch.equal(a(x), b(x))


def sequential(*middle):
    return nn.Sequential(nn.GroupNorm(2, 4), *middle, nn.Conv2d(4, 4, 1))


def test_sequentials():
    named = nn.Sequential()
    named.add_module("norm", nn.GroupNorm(2, 4))
    named.add_module("act", nn.SiLU(inplace=True))
    model = nn.Sequential(
        sequential(nn.SiLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(4, 4)),
        named,
        sequential(nn.Identity(), nn.SiLU()),
    )
    wanted = {
        "0.3": "goes to Conv2d (`self[4](input)`)",
        "2.0": "goes to Identity (`self[1](input)`)",
    }
    check(model, ("0.0", "1.norm"), wanted)
    check(nn.Sequential(nn.GroupNorm(2, 4)), (), {"0": "`return input`"})


def test_sequential_may_change_after_patching():
    model, x = sequential(nn.SiLU(), nn.Conv2d(4, 4, 1)), inputs()
    gnsilu.patch(model)
    plain = nn.Sequential(*model)
    model.append(nn.Tanh())
    assert torch.equal(model(x), plain(x).tanh())
    assert torch.equal(model[:2](x), plain[:2](x))
    model[1], plain[1] = nn.GELU(), nn.GELU()
    assert torch.equal(model[:4](x), plain(x))
    gnsilu.unpatch(model)
    assert type(model) is nn.Sequential and type(plain) is nn.Sequential


def refused(model, fused, reason):
    """One GroupNorm is not fused, for a reason that matches."""
    report = gnsilu.patch(model)
    assert report.fused == fused, str(report)
    reasons = {site.reason for site in report.sites if not site.fused}
    assert all(re.search(reason, found) for found in reasons) and reasons, str(report)
    gnsilu.unpatch(model)


@pytest.mark.parametrize(
    ("model", "fused", "reason"),
    [
        (models.Nested(norm=models.OwnForward(2, 4)), ("norm2",), "has a forward of its own"),
        (models.hooked("norm"), ("norm2",), "it has hooks"),
        (models.hooked("act"), ("norm",), r"goes to SiLU \(`self.act\("),
        (models.replaced(), (), "its parent's forward was replaced"),
        (models.parametrised("norm"), ("norm2",), "it is parametrised"),
        (models.parametrised("parent"), (), "its parent is parametrised"),
        (models.shared(), ("0.norm2",), "a child of several modules"),
        (models.uninitialised(), ("norm2",), "not initialised yet"),
        (models.registering(), (), "a subclass of its parent's class, Registering, may have"),
        (models.Property(), (), "its parent's norm is not what it is registered as"),
        (models.made_by_exec(), (), "cannot be read|is not what runs"),
        (models.made_elsewhere(), (), "is not what runs"),
        (nn.GroupNorm(2, 4), (), "it is the model itself"),
        (nn.ModuleList([nn.GroupNorm(2, 4)]), (), "its parent, a ModuleList, has no forward"),
        (models.Zipped(), (), "its parent, a ModuleList, has no forward"),
    ],
)
def test_modules_that_are_no_ordinary_ones(model, fused, reason):
    refused(model, fused, reason)


def test_subclass_without_a_forward_is_a_group_norm():
    check(models.Nested(norm=models.NoForward(2, 4)), BOTH, {})


def test_model_without_a_site_stays_as_it_was():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU())
    report = gnsilu.patch(model)
    assert report.sites == () and str(report) == "0 of 0 GroupNorms fused"
    assert type(model) is nn.Sequential
    gnsilu.unpatch(model)  # nor is there anything to undo
    assert type(model) is nn.Sequential


def test_report_is_a_table():
    report = gnsilu.patch(models.Super())
    assert str(report).splitlines() == [
        "1 of 2 GroupNorms fused",
        "fused  norm   `self.act(self.norm(h))` follows",
        "-----  norm2  Super.forward does not call it",
    ]
    assert report.not_fused == ("norm2",) and report.sites[0].fused
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.sites = ()


@pytest.mark.parametrize("function", [gnsilu.patch, gnsilu.unpatch])
def test_anything_else_than_a_module_is_refused(function):
    with pytest.raises(TypeError, match=r"model is a int; a torch\.nn\.Module is wanted"):
        function(3)
    with pytest.raises(TypeError, match="patch before scripting"):
        function(torch.jit.script(nn.GroupNorm(2, 4)))


def test_patching_again_looks_anew():
    model, x = models.Nested(), inputs()
    first, cls = gnsilu.patch(model), type(model)
    assert gnsilu.patch(model) == first and type(model) is cls
    other = models.Nested()
    gnsilu.patch(other)
    assert type(other) is cls and cls.__name__ == "Nested" and isinstance(model, models.Nested)
    handle = model.norm.register_forward_hook(lambda *_: None)
    assert gnsilu.patch(model).fused == ("norm2",) and type(model) is not cls
    handle.remove()
    gnsilu.unpatch(model)
    assert type(model) is models.Nested
    gnsilu.unpatch(model)
    assert torch.equal(model(x), models.Nested.forward(model, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sites_are_the_operator(dtype):
    model, x = models.Nested().to(dtype), inputs(dtype)
    seen = []
    model.conv.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    gnsilu.patch(model)
    with torch.no_grad():
        model(x)
        wanted = gnsilu.group_norm_silu(x, 2, model.norm.weight, model.norm.bias, model.norm.eps)
    assert seen[0].dtype == dtype and torch.equal(seen[0], wanted)


def test_what_is_changed_after_patching_is_respected():
    model, x = models.Nested(), inputs()
    plain = copy.deepcopy(model)
    gnsilu.patch(model)

    def both(change):
        change(model), change(plain)
        torch.testing.assert_close(model(x), plain(x))

    def hook(module):
        module.register_forward_hook(lambda module, arguments, y: y * 2)

    def replace_forward(module):
        forward = module.forward
        module.forward = lambda x: forward(x) + 1

    both(lambda m: hook(m.norm))
    both(lambda m: hook(m.act))
    both(lambda m: replace_forward(m.norm2))
    both(lambda m: setattr(m, "act", nn.GELU()))
    both(lambda m: setattr(m, "norm", nn.Identity()))
    both(lambda m: hook(m))


@pytest.mark.parametrize("model", [models.NewArguments(), models.NewKeywords()])
def test_what_pickle_hands_to_new(model):
    gnsilu.patch(model)
    for clone in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(clone) is type(model) and clone.made_with == "made with this"
        assert torch.equal(clone(inputs()), model(inputs()))


def test_hooks_for_all_modules_are_respected():
    model = models.Nested()
    gnsilu.patch(model)
    hooks = torch.nn.modules.module
    with hooks.register_module_forward_hook(
        lambda module, _, y: 3 * y if isinstance(module, nn.GroupNorm) else y
    ):
        tripled = model(inputs())
        gnsilu.unpatch(model)
        assert torch.equal(tripled, model(inputs()))
    gnsilu.patch(model)
    assert not torch.allclose(tripled, model(inputs()), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("function", [gnsilu.patch, gnsilu.unpatch])
def test_a_class_derived_from_a_patched_one_is_named(function):
    model = nn.Sequential(models.Nested())
    gnsilu.patch(model)
    model[0].extra = nn.Parameter(torch.ones(2))
    nn.utils.parametrize.register_parametrization(model[0], "extra", nn.Identity())
    patched = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match=r"model\.0: its class, ParametrizedNested, is derived"):
        function(model)
    assert patched == {name: type(module) for name, module in model.named_modules()}
    nn.utils.parametrize.remove_parametrizations(model[0], "extra")
    function(model)


def test_gradients_are_those_of_the_unpatched_model():
    model = models.Nested()
    patched, x = copy.deepcopy(model), inputs().requires_grad_()
    assert gnsilu.patch(patched).fused == BOTH
    parameters = [[x, *m.parameters()] for m in (model, patched)]
    pairs = [
        torch.autograd.grad(m(x).sin().sum(), p)
        for m, p in zip((model, patched), parameters, strict=True)
    ]
    torch.testing.assert_close(pairs[1], pairs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_patched_too(method):
    model = nn.Sequential(models.Nested(), *sequential(nn.SiLU()), models.Setting(mode="default"))
    model[-1].extra = False
    model[0].conv.register_forward_hook(models.double)
    assert gnsilu.patch(model).fused == ("0.norm", "0.norm2", "1", "4.norm")
    copied, x = method(model), inputs()
    assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(copied(x), model(x))
    gnsilu.unpatch(copied)
    assert type(copied[0]) is models.Nested and type(model[0]) is not models.Nested
    torch.testing.assert_close(copied(x), model(x))


def test_whole_model_is_saved_and_state_dicts_go_both_ways(tmp_path):
    model, x = models.Nested(), inputs()
    gnsilu.patch(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded) is type(model) and torch.equal(loaded(x), model(x))
    plain = models.Nested()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), model(x))


def test_decorators_stay():
    model = models.Decorated()
    y = model(inputs())
    gnsilu.patch(model)
    assert not model(inputs()).requires_grad
    torch.testing.assert_close(model(inputs()), y)
    assert inspect.signature(type(model).forward) == inspect.signature(models.Decorated.forward)


def test_out_of_memory_passes_through(monkeypatch):
    def out_of_memory(*_):
        raise error

    error = torch.OutOfMemoryError("no memory")
    model = models.Nested()
    gnsilu.patch(model)
    monkeypatch.setattr("gnsilu.patching.group_norm_silu", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(inputs())
    assert raised.value is error
