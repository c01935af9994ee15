"""GroupNorm followed by SiLU, fused throughout a model that is already there.

A site is a GroupNorm whose result SiLU alone reads. :func:`patch` finds sites in the source of the
forward of the GroupNorm's parent (:mod:`gnsilu.norm_calls`), writes that forward anew with the two
calls as one, and gives the parent a subclass of its class with this forward. Parameters, children,
hooks and attributes stay what they are, other instances of the class, too; unpatching sets the
class back.

Why not leave the forward alone and let GroupNorm return a lazy tensor that SiLU turns into the
fused call? That takes a tensor subclass: TorchScript cannot compile it, every operator that it
meets is dispatched through Python, and it learns of a second reader only when that comes, after the
fused call. The source tells all readers beforehand, and what runs then is an ordinary method.

The fused call makes sure that both modules still are what they were (other classes, hooks, a
replaced forward) and else calls them. TorchScript, whose code looks at nothing, refuses to compile
what has changed.
"""

from __future__ import annotations

import abc
import ast
import copy
import copyreg
import functools
import operator
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeGuard

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy

from gnsilu.functional import _kind, group_norm_silu
from gnsilu.method_source import RefusedError, plain_function, read, rewritten
from gnsilu.norm_calls import Analysis, Rewriter

# torch.fx keeps the call whole, as it does nn.GroupNorm.
torch.fx.wrap("_fused")


@dataclass(frozen=True)
class Site:
    """A GroupNorm of a model."""

    name: str
    """Its qualified name in the model."""
    fused: bool
    """Whether it is fused with the SiLU that follows."""
    reason: str
    """Why, or why not."""


@dataclass(frozen=True)
class PatchReport:
    """What :func:`gnsilu.patch` found: every GroupNorm of the model."""

    sites: tuple[Site, ...]

    @property
    def fused(self) -> tuple[str, ...]:
        """The names of the GroupNorms that are fused."""
        return tuple(site.name for site in self.sites if site.fused)

    @property
    def not_fused(self) -> tuple[str, ...]:
        """The names of those that are left alone."""
        return tuple(site.name for site in self.sites if not site.fused)

    def __str__(self) -> str:
        width = max((len(site.name) for site in self.sites), default=0)
        rows = [
            f"{'fused' if site.fused else '-----'}  {site.name:{width}}  {site.reason}"
            for site in self.sites
        ]
        return "\n".join([f"{len(self.fused)} of {len(self.sites)} GroupNorms fused", *rows])


def patch(model: nn.Module) -> PatchReport:
    """Fuses each GroupNorm of a model with the SiLU that follows, where nothing else reads it.

    The model is changed in place: the modules that call such a pair get a subclass of their class.
    Outputs change as far as :func:`gnsilu.group_norm_silu` is more exact than the two operators.
    Its result has x's dtype; for 16-bit x under autocast on a GPU, autocast's. Patch before
    compiling, scripting or tracing. Patching again looks anew.

    Args:
        model: any module. Its GroupNorms are those in ``model.modules()``.

    Returns:
        Every GroupNorm by its name, fused or not, and why. ``print(report)`` shows a table.

    Raises:
        TypeError: model is no module, or a TorchScript module, whose code is fixed.
        RuntimeError: a class was derived from one that an earlier call made, by a parametrisation
            or by FSDP for instance.
    """
    _check(model)
    parents = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    uses = Counter(
        id(child) for parent in parents for child in parent._modules.values() if child is not None
    )
    verdicts: dict[int, tuple[bool, str]] = {}
    classes: list[tuple[nn.Module, type]] = []
    for parent in parents:
        found, cls = _examine(parent, uses)
        verdicts.update(found)
        classes.append((parent, cls))
    for parent, cls in classes:
        if type(parent) is not cls:
            object.__setattr__(parent, "__class__", cls)
    return PatchReport(
        tuple(
            Site(name, *verdicts.get(id(module), (False, "it is the model itself")))
            for name, module in model.named_modules()
            if isinstance(module, nn.GroupNorm)
        )
    )


def unpatch(model: nn.Module) -> None:
    """Undoes :func:`gnsilu.patch`: every module in the model gets its own class back.

    Raises:
        TypeError: model is no module, or a TorchScript module.
        RuntimeError: a class was derived from a patched one since; nothing is undone then.
    """
    _check(model)
    for module in model.modules():
        cls = _own_class(module)
        if type(module) is not cls:
            object.__setattr__(module, "__class__", cls)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_kind(model)}; a torch.nn.Module is wanted")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model is a TorchScript module; a torch.nn.Module is wanted: patch before scripting or "
            "tracing"
        )
    for name, module in model.named_modules():
        cls = type(module)
        if any("_gnsilu_patched_from" in vars(base) for base in cls.__mro__[1:]):
            raise RuntimeError(
                f"model{'.' if name else ''}{name}: its class, {cls.__name__}, is derived from the "
                "patched one (it was parametrised, or sharded, since): undo that first"
            )


def _own_class(module: nn.Module) -> type[nn.Module]:
    cls: type[nn.Module] = vars(type(module)).get("_gnsilu_patched_from", type(module))
    return cls


def _children(parent: nn.Module, sequential: bool) -> dict[str, nn.Module]:
    """By name; in a Sequential children are known by their places."""
    return {
        str(place) if sequential else name: child
        for place, (name, child) in enumerate(parent._modules.items())
        if child is not None
    }


def _examine(
    parent: nn.Module, uses: Counter[int]
) -> tuple[dict[int, tuple[bool, str]], type[nn.Module]]:
    """Of each GroupNorm that is a child, whether it is fused, and why; and the class for parent."""
    cls = _own_class(parent)
    sequential = cls.forward is nn.Sequential.forward
    children = _children(parent, sequential)
    norms = {name: child for name, child in children.items() if isinstance(child, nn.GroupNorm)}
    verdicts = {
        name: (False, problem) for name, norm in norms.items() if (problem := _problem(norm, uses))
    }
    wanted = frozenset(norms) - frozenset(verdicts)
    if wanted:
        values = children if sequential else {**parent.__dict__, **children}
        activations = frozenset(name for name, value in values.items() if _is_silu(value))
        length = len(children) if sequential else None
        try:
            _check_parent(parent, cls, () if sequential else wanted | activations)
            analysis = _analysis(Recipe(cls, wanted, activations, length), children)
            verdicts |= {name: analysis.verdict(name, parent) for name in wanted}
            fused = frozenset(name for name in wanted if verdicts[name][0])
            if fused:
                cls = _patched_class(Recipe(cls, fused, activations, length))
        except RefusedError as refusal:
            verdicts |= {name: (False, str(refusal)) for name in wanted}
    return {id(norm): verdicts[name] for name, norm in norms.items()}, cls


def _problem(norm: nn.GroupNorm, uses: Counter[int]) -> str | None:
    """Why this GroupNorm is not to be fused, whatever uses its result."""
    if hasattr(norm, "parametrizations"):
        return "it is parametrised"
    if not _has_forward_of(norm, nn.GroupNorm):
        return f"its class, {type(norm).__name__}, or itself has a forward of its own"
    if _has_hooks(norm):
        return "it has hooks"
    if any(is_lazy(parameter) for parameter in norm.parameters()):
        return "its parameters are not initialised yet"
    if uses[id(norm)] > 1:
        return "it is a child of several modules, or several times"
    return None


def _check_parent(parent: nn.Module, cls: type[nn.Module], names: Iterable[str]) -> None:
    if cls.forward is nn.Module.forward:
        raise RefusedError(f"its parent, a {cls.__name__}, has no forward")
    if "forward" in parent.__dict__:
        raise RefusedError("its parent's forward was replaced")
    if hasattr(parent, "parametrizations"):
        raise RefusedError("its parent is parametrised")
    if hasattr(cls.__init_subclass__, "__func__") or type(cls) not in (type, abc.ABCMeta):
        raise RefusedError(
            f"a subclass of its parent's class, {cls.__name__}, may have side effects"
        )
    if cls.forward is nn.Sequential.forward and any(
        getattr(cls, name) is not getattr(nn.Sequential, name)
        for name in ("__getitem__", "__iter__", "__len__")
    ):
        raise RefusedError(f"its parent, a {cls.__name__}, has a way of its own to find children")
    for name in names:
        value = parent._modules.get(name, parent.__dict__.get(name))
        if getattr(parent, name, None) is not value:
            raise RefusedError(f"its parent's {name} is not what it is registered as")


# Deciding and rewriting


@dataclass(frozen=True)
class Recipe:
    """What determines a patched class."""

    cls: type[nn.Module]
    norms: frozenset[str]
    """The children whose calls are fused."""
    activations: frozenset[str]
    """The attributes that are SiLU."""
    length: int | None
    """Of an nn.Sequential."""


def _analysis(recipe: Recipe, children: Mapping[str, nn.Module]) -> Analysis:
    function = plain_function(recipe.cls.forward)
    indexed = recipe.length is not None
    tree = _tree(function) if recipe.length is None else _sequential_tree(recipe.length)
    kinds = {name: type(child).__name__ for name, child in children.items()}
    return Analysis(copy.deepcopy(tree), function, recipe.norms, recipe.activations, kinds, indexed)


_tree = functools.lru_cache(maxsize=256)(read)


def _sequential_tree(length: int) -> ast.FunctionDef:
    calls = "".join(f"    input = self[{place}](input)\n" for place in range(length))
    # Another length: extended since, or a slice of it. TorchScript has no len(self), nor needs it.
    tree = ast.parse(
        "def forward(self, input):\n"
        "    if not gnsilu_scripting():\n"
        f"        if len(self) != {length}:\n"
        "            for module in self:\n"
        "                input = module(input)\n"
        "            return input\n"
        f"{calls}    return input\n"
    )
    (node,) = tree.body
    assert isinstance(node, ast.FunctionDef)
    return node


@functools.lru_cache(maxsize=1024)
def _patched_class(recipe: Recipe) -> type[nn.Module]:
    cls = recipe.cls
    analysis = _analysis(recipe, {})
    tree = Rewriter(analysis, recipe.norms).visit(analysis.tree)
    helpers = {
        "gnsilu_op": torch.ops.gnsilu.group_norm_silu,
        "gnsilu_fused": _call,
        "gnsilu_scripting": torch.jit.is_scripting,
    }

    def reduce(self: nn.Module, protocol: SupportsIndex) -> Any:
        # By the recipe: pickle finds no class that is in no module.
        reduced = super(patched, self).__reduce_ex__(max(operator.index(protocol), 2))
        if type(self) is not patched or reduced[1][:1] != (patched,):
            return reduced
        if reduced[0] is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
            return (_new, (recipe, *reduced[1][1:]), *reduced[2:])
        return (_new, (recipe, reduced[1][1:], {}), *reduced[2:])

    def prepare(self: nn.Module) -> Any:
        _check_unchanged(self, recipe)
        own = getattr(super(patched, self), "__prepare_scriptable__", None)
        return self if own is None else own()

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
        "__prepare_scriptable__": prepare,  # torch.jit.script calls it
        "_gnsilu_patched_from": cls,
        "forward": rewritten(cls.forward, tree, helpers),
    }
    patched: type[nn.Module] = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(namespace)
    )
    return patched


def _new(recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """An instance without attributes, to be filled by copy or pickle."""
    patched = _patched_class(recipe)
    return patched.__new__(patched, *args, **kwargs)


def _check_unchanged(module: nn.Module, recipe: Recipe) -> None:
    """A scripted forward has no fused call that would look at its modules each time."""
    children = _children(module, recipe.length is not None)
    values = {**module.__dict__, **children}
    changed = [name for name in recipe.norms if not _is_group_norm(children.get(name))]
    changed += [name for name in recipe.activations if not _is_silu(values.get(name))]
    if recipe.length is not None and len(children) != recipe.length:
        changed.append("number of children")
    if changed:
        raise RuntimeError(
            f"{type(module).__name__}: {', '.join(sorted(changed))} changed since gnsilu.patch; "
            "patch again before scripting"
        )


# What a patched forward calls


def _call(norm: nn.Module, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """activation(norm(x)), fused where both still are what they were when they were patched."""
    if not (_is_group_norm(norm) and _is_silu(activation)) or _has_global_hooks():
        return activation(norm(x))
    return _fused(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


def _fused(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    dtype = None
    # Autocast would have an FP32 result, which the next operator rounds. (On a CPU it leaves
    # group_norm alone.)
    device = x.device.type
    half = x.dtype in (torch.bfloat16, torch.float16)
    if half and device not in ("cpu", "meta") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return group_norm_silu(x, num_groups, weight, bias, eps, dtype)


def _is_group_norm(value: object) -> TypeGuard[nn.GroupNorm]:
    return (
        isinstance(value, nn.GroupNorm)
        and _has_forward_of(value, nn.GroupNorm)
        and not _has_hooks(value)
    )


def _has_global_hooks() -> bool:
    """register_module_forward_hook and the like, for all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def _is_silu(value: object) -> bool:
    if isinstance(value, nn.SiLU):
        return _has_forward_of(value, nn.SiLU) and not _has_hooks(value)
    return value is F.silu


def _has_forward_of(module: nn.Module, cls: type[nn.Module]) -> bool:
    own = type(module)
    same = own.forward is cls.forward and own.__call__ is nn.Module.__call__
    return same and "forward" not in module.__dict__


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
