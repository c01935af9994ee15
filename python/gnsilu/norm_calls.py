"""Which GroupNorm calls in the source of a forward have a result that only SiLU reads.

The method is followed statement by statement: which names may hold the result of which GroupNorm
call, and what reads them. What is not understood counts as a reader, so that a doubt is a refusal.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

import torch.nn.functional as F
from torch import nn

from gnsilu.method_source import RefusedError, reached


@dataclass(eq=False)
class NormCall:
    """One call of a GroupNorm in the source."""

    name: str
    activations: list[ast.Call] = field(default_factory=list)
    """The SiLU calls that read its result: one on each path."""
    problem: str | None = None
    """Why it cannot be fused."""

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


# What a name may hold: results of GroupNorm calls (and whether SiLU has read them), and None for
# anything else. A name that is missing holds anything else.
Values = frozenset["tuple[NormCall, bool] | None"]
Environment = dict[str, Values]
ELSE: Values = frozenset([None])

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NESTED_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *COMPREHENSIONS)
SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class Analysis:
    """What becomes of the results of the GroupNorm calls in one forward.

    Args:
        tree: of the forward. Statements in it are moved, without a change of meaning.
        function: the forward itself, for the meaning of global names.
        norms: the children of self that are GroupNorms.
        activations: the attributes of self that are SiLU.
        kinds: the class names of all children, for the reasons.
        indexed: children are `self[0]` instead of `self.name`.

    Raises:
        RefusedError: the forward does what cannot be followed.
    """

    def __init__(
        self,
        tree: ast.FunctionDef,
        function: FunctionType,
        norms: frozenset[str],
        activations: frozenset[str],
        kinds: Mapping[str, str],
        indexed: bool,
    ) -> None:
        self.tree, self.function, self.indexed = tree, function, indexed
        self.norms, self.activations, self.kinds = norms, activations, kinds
        self.calls: dict[ast.Call, NormCall] = {}
        self._self = tree.args.args[0].arg
        self._check_names()
        self._sink_activations(tree.body)
        self._opaque = False
        self._block(tree.body, {})
        for call in self.calls.values():
            if not call.activations:
                call.refuse("nothing uses its result")
            elif len({ast.dump(activation.func) for activation in call.activations}) > 1:
                call.refuse("its result goes to several activations")

    def verdict(self, name: str, module: nn.Module) -> tuple[bool, str]:
        """Whether the GroupNorm can be fused where module is self, and why."""
        forward = f"{type(module).__name__}.forward"
        if not any(call.name == name for call in self.calls.values()):
            return False, f"{forward} does not call it"
        nodes = (node for node in reached(self.tree, self._self, module) if node in self.calls)
        calls = [call for node in nodes if (call := self.calls[node]).name == name]
        if not calls:
            return False, f"{forward} does not reach its call, as this module is set up"
        for call in calls:
            if call.problem is not None:
                return False, call.problem
        return True, f"`{_text(calls[0].activations[0])}` follows"

    def _check_names(self) -> None:
        nodes = [node for node in ast.walk(self.tree) if node is not self.tree]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        parameters = [node.arg for node in nodes if isinstance(node, ast.arg)]
        # Bound by imports, `except ... as`, `case`, nested functions and classes.
        others = {
            name.split(".")[0]
            for node in nodes
            for attribute in ("name", "asname", "rest")
            if isinstance(name := getattr(node, attribute, None), str)
        }
        self._bound = {name.id for name in names if not _loaded(name)} | {*parameters} | others
        assigned = self._bound - {*parameters}
        if self._self in assigned or parameters.count(self._self) > 1:
            raise RefusedError(f"its parent's forward binds {self._self} again")
        if observers := {name.id for name in names} & {"locals", "vars", "dir", "eval", "exec"}:
            raise RefusedError(
                f"its parent's forward uses {min(observers)}, which may read any name"
            )
        for node in nodes:
            if isinstance(node, ast.Attribute) and not _loaded(node):
                child = self._child(node)
                if child in self.norms or child in self.activations:
                    raise RefusedError(f"its parent's forward assigns {self._self}.{child}")
        # Names that something else than the statements in order reads or writes.
        self._untracked = others
        for node in nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._untracked.update(node.names)
            elif isinstance(node, ast.NamedExpr):
                self._untracked |= _stored(node.target)
            elif isinstance(node, NESTED_SCOPES):
                names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
                if isinstance(node, COMPREHENSIONS):  # what is iterated over is read outside
                    outside = list(ast.walk(node.generators[0].iter))
                    names = [name for name in names if name not in outside]
                self._untracked |= {name.id for name in names}

    # Statements

    def _block(self, statements: list[ast.stmt], env: Environment | None) -> Environment | None:
        """The environment after statements; None where their end is not reached."""
        for statement in statements:
            if env is None:
                break
            env = self._statement(statement, env)
        return env

    def _statement(self, node: ast.stmt, env: Environment) -> Environment | None:
        if isinstance(node, ast.If):
            self._read(node.test, env, node.test)
            return _join(self._block(node.body, {**env}), self._block(node.orelse, {**env}))
        if isinstance(node, ast.Return | ast.Raise):
            self._read(node, env, node)
            return None
        if isinstance(node, ast.Assign | ast.AnnAssign):
            self._assign(node, env)
        elif isinstance(node, ast.AugAssign | ast.Expr | ast.Assert | ast.Delete | ast.Pass):
            self._read(node, env, node)
            _forget(node, env)
        else:
            self._unordered(node, env)
        return env

    def _assign(self, node: ast.Assign | ast.AnnAssign, env: Environment) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        alone = isinstance(node, ast.AnnAssign) or len(node.targets) == 1
        value = node.value
        if value is None:  # a declaration
            return
        if isinstance(value, ast.Call) and isinstance(target, ast.Name) and alone:
            call = self._norm_call(value)
            if call is not None and not call.problem:
                self._read(value.args[0], env, value)
                env[target.id] = frozenset([(call, False)])
                if target.id in self._untracked:
                    call.refuse(f"its result is {target.id}, which a nested scope uses, too")
                return
        self._read(node, env, node)
        _forget(node, env)

    def _unordered(self, node: ast.stmt, env: Environment) -> None:
        """Loops, with, try, match, nested functions: a part may run once, often or not at all.
        Every name in it counts as read; norm and SiLU can be fused in one expression only."""
        keyword = type(node).__name__.lower()
        for part in ast.walk(node):
            if isinstance(part, ast.Assign | ast.AnnAssign) and isinstance(part.value, ast.Call):
                call = self._norm_call(part.value)
                if call is not None:
                    call.refuse(f"its result is assigned inside a `{keyword}` statement")
        self._opaque = True
        self._read(node, env, node)
        self._opaque = False
        for name in _stored(node) & set(env):
            env[name] |= ELSE

    # Expressions

    def _read(self, node: ast.AST, env: Environment, user: ast.AST) -> None:
        """Notes what an expression or statement reads. user: what contains it."""
        if isinstance(node, ast.Name):
            if _loaded(node):
                self._use(env.get(node.id, ELSE), user)
            return
        if isinstance(node, ast.Call):
            argument = node.args[0] if self._is_activation(node) else None
            if isinstance(argument, ast.Call) and (call := self._norm_call(argument)):
                call.activations.append(node)
                for part in (*argument.args, *argument.keywords):
                    self._read(part, env, argument)
                return
            if isinstance(argument, ast.Name) and not self._opaque:
                self._activate(argument.id, node, env)
                return
            if call := self._norm_call(node):
                self._use([(call, False)], user)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._use(env.get(node.target.id, ELSE), node)
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Attribute):
            user = node
        for child in ast.iter_child_nodes(node):
            self._read(child, env, user)

    def _activate(self, name: str, node: ast.Call, env: Environment) -> None:
        """`silu(name)`."""
        values = env.get(name, ELSE)
        calls = [value for value in values if value is not None]
        for call, activated in calls:
            if len(values) > 1:
                call.refuse(f"`{_text(node)}` may get another value instead")
            elif activated:
                call.refuse("SiLU reads its result more than once")
            else:
                call.activations.append(node)
        if calls:
            env[name] = frozenset((call, True) for call, _ in calls)

    def _use(self, values: Iterable[tuple[NormCall, bool] | None], user: ast.AST) -> None:
        """Something else than SiLU reads values."""
        for call, activated in filter(None, values):
            child = self._child(user.func) if isinstance(user, ast.Call) else None
            if activated:
                call.refuse(f"`{_text(user)}` uses its result, too")
            elif child and child in self.kinds:
                kind = self.kinds[child]
                call.refuse(f"its result goes to {kind} (`{_text(user)}`), not straight to SiLU")
            else:
                call.refuse(f"its result is used in `{_text(user)}`")

    def _child(self, node: ast.AST) -> str:
        """The x of `self.x`, or of `self[x]`; else nothing."""
        value = getattr(node, "value", None)
        if isinstance(value, ast.Name) and value.id == self._self:
            if isinstance(node, ast.Attribute):
                return node.attr
            if isinstance(node, ast.Subscript) and self.indexed:
                return ast.unparse(node.slice)
        return ""

    def _norm_call(self, node: ast.Call) -> NormCall | None:
        """The call of a GroupNorm that this is. One with arguments that GroupNorm does not take is
        none: it raises an error, fused or not, and no value comes from it."""
        name = self._child(node.func)
        unpacked = any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            keyword.arg is None for keyword in node.keywords
        )
        one_argument = len(node.args) + len(node.keywords) == 1
        if name not in self.norms or not (one_argument or unpacked):
            return None
        call = self.calls.setdefault(node, NormCall(name))
        if unpacked or node.keywords:
            call.refuse(f"it is called as `{_text(node)}`, not with one positional argument")
        return call

    def _is_activation(self, node: ast.Call) -> bool:
        """Whether this is a call of SiLU, by an attribute of self or as the function."""
        if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            return False
        child = self._child(node.func)
        if child:
            return child in self.activations and not node.keywords
        in_place = all(
            keyword.arg == "inplace" and isinstance(keyword.value, ast.Constant)
            for keyword in node.keywords
        )
        return in_place and self._resolve(node.func) is F.silu

    def _resolve(self, node: ast.AST) -> object:
        """What a global name, or an attribute of a Python module, stands for; None if unknown."""
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        if not isinstance(node, ast.Name) or node.id in self._bound:
            return None
        closure = self.function.__closure__ or ()
        cells = dict(zip(self.function.__code__.co_freevars, closure, strict=True))
        if node.id in cells:
            return cells[node.id].cell_contents
        return self.function.__globals__.get(node.id)

    # Activations behind an `if`

    def _sink_activations(self, block: list[ast.stmt]) -> None:
        """Moves a statement that applies SiLU into the branches of an `if` before it, where one of
        them ends in `x = self.norm(...)`: norm and SiLU then follow each other."""
        for i, node in enumerate(block):  # block gets shorter behind i
            if not isinstance(node, ast.If):
                continue
            names = self._activated_names(block[i + 1]) if i + 1 < len(block) else set()
            if self._ends_in_norm(node, names):
                follower = block.pop(i + 1)
                for branch in (node.body, node.orelse):
                    if not branch or not isinstance(branch[-1], JUMPS):
                        branch.append(copy.deepcopy(follower))
            self._sink_activations(node.body)
            self._sink_activations(node.orelse)

    def _activated_names(self, node: ast.stmt) -> set[str]:
        if not isinstance(node, SIMPLE_STATEMENTS):
            return set()
        calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and self._is_activation(n))
        return {call.args[0].id for call in calls if isinstance(call.args[0], ast.Name)}

    def _ends_in_norm(self, node: ast.If, names: set[str]) -> bool:
        for branch in (node.body, node.orelse):
            last = branch[-1] if branch else None
            if isinstance(last, ast.If) and self._ends_in_norm(last, names):
                return True
            if isinstance(last, ast.Assign) and isinstance(last.value, ast.Call):
                norm = self._child(last.value.func) in self.norms
                if norm and _stored(last) & names:
                    return True
        return False


class Rewriter(ast.NodeTransformer):
    """Puts a fused call where one of these GroupNorms is called, and nothing where SiLU is applied
    to its result. It adds the free variables `gnsilu_op`, `gnsilu_fused` and `gnsilu_scripting`.
    """

    def __init__(self, analysis: Analysis, norms: frozenset[str]) -> None:
        self._calls = {
            node: call
            for node, call in analysis.calls.items()
            if call.name in norms and call.problem is None
        }
        self._activations = {node for call in self._calls.values() for node in call.activations}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node in self._activations:
            x: ast.AST = self.visit(node.args[0])
            return x
        call = self._calls.get(node)
        self.generic_visit(node)
        if call is None:
            return node
        norm, argument = ast.unparse(node.func), ast.unparse(node.args[0])
        activation = ast.unparse(call.activations[0].func)
        # TorchScript compiles the first branch only: a module is no argument there.
        return ast.parse(
            f"gnsilu_op({argument}, {norm}.num_groups, {norm}.weight, {norm}.bias, {norm}.eps) "
            f"if gnsilu_scripting() else gnsilu_fused({norm}, {activation}, {argument})",
            mode="eval",
        ).body


def _loaded(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _text(node: ast.AST) -> str:
    text = ast.unparse(node).split("\n")[0]
    return text if len(text) <= 60 else text[:57] + "..."


def _stored(node: ast.AST) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if not _loaded(name)}


def _forget(node: ast.AST, env: Environment) -> None:
    for name in _stored(node):
        env.pop(name, None)


def _join(a: Environment | None, b: Environment | None) -> Environment | None:
    if a is None or b is None:
        return b if a is None else a
    return {name: a.get(name, ELSE) | b.get(name, ELSE) for name in {**a, **b}}
