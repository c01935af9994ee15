"""The source of a method as a syntax tree, what of it runs, and a method from a changed tree."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn


class RefusedError(Exception):
    """A module whose forward cannot be read or followed; the message says why."""


def plain_function(method: object) -> FunctionType:
    """The function of a method, below its decorators."""
    function = inspect.unwrap(method) if callable(method) else method
    if not isinstance(function, FunctionType):
        raise RefusedError("its parent's forward is no Python function")
    return function


def read(function: FunctionType) -> ast.FunctionDef:
    """The tree of a method's source, if that is what runs.

    Raises:
        RefusedError: there is no source, or it is another one.
    """
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        tree, whole = _parsed(text, code.co_filename)
    except (SyntaxError, ValueError):
        raise RefusedError("the source of its parent's forward cannot be read") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and node.args.args:
            first_line = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            if first_line == code.co_firstlineno and code in _codes(whole):
                _refuse_private_names(node)
                return node
    raise RefusedError("the source of its parent's forward is not what runs, or not to be found")


@functools.lru_cache(maxsize=16)
def _parsed(text: str, filename: str) -> tuple[ast.Module, CodeType]:
    try:
        tree = ast.parse(text, type_comments=True)  # TorchScript reads them
    except SyntaxError:  # a comment that begins with "type:" and is none
        tree = ast.parse(text)
    return tree, compile(text, filename, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _refuse_private_names(method: ast.FunctionDef) -> None:
    for node in ast.walk(method):
        name = getattr(node, "attr", getattr(node, "id", None))
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            raise RefusedError(f"its parent's forward uses the private name {name}")


def rewritten(
    method: Callable[..., Any], node: ast.FunctionDef, extra: Mapping[str, object]
) -> FunctionType:
    """A method from a changed tree, with what the original one has: globals, closure, defaults,
    annotations, decorators.

    Args:
        method: the original one.
        node: the changed tree.
        extra: further free variables of the tree, by name.

    Raises:
        RefusedError: it has a decorator that cannot be applied again.
    """
    function = plain_function(method)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in extra.items()}
    node.decorator_list = []
    # In a function whose parameters are the method's free variables.
    (enclosing,) = ast.parse(f"def enclosing({', '.join(cells)}): pass").body
    assert isinstance(enclosing, ast.FunctionDef)
    enclosing.body = [node]
    signature, node.type_comment = node.type_comment, None
    text = ast.unparse(enclosing) + "\n"
    if signature is not None:  # TorchScript wants it on a line of its own
        body = text.index("\n", text.index(" def "))
        text = f"{text[:body]}\n        # type: {signature}{text[body:]}"
    # In linecache for tracebacks, the inspect module and, with it, TorchScript.
    name = f"{function.__module__}.{function.__qualname__}"
    filename = f"<{name}, rewritten by gnsilu, {zlib.crc32(text.encode()):08x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code: CodeType = compile(text, filename, "exec", flags=flags, dont_inherit=True)
    for nested in ("enclosing", node.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == nested)
    made = _copied(function, code, tuple(cells[name] for name in code.co_freevars))
    return _decorated(method, function, made)


def _decorated(
    method: Callable[..., Any], function: FunctionType, made: FunctionType
) -> FunctionType:
    """made below copies of the decorators that method has around function."""
    if method is function:
        return made
    inner = method.__wrapped__  # type: ignore[attr-defined]
    cells = list(getattr(method, "__closure__", None) or ())
    places = [i for i, cell in enumerate(cells) if cell.cell_contents is inner]
    if not isinstance(method, FunctionType) or len(places) != 1:
        raise RefusedError("its parent's forward has a decorator that cannot be applied again")
    inner = _decorated(inner, function, made)
    cells[places[0]] = CellType(inner)
    outer = _copied(method, method.__code__, tuple(cells))
    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    return outer


def _copied(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made


# Which branches a module takes

UNKNOWN = object()
COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def reached(node: ast.AST, me: str, module: nn.Module) -> Iterator[ast.AST]:
    """The nodes of a forward without the branches that the attributes of module (in the forward
    called me) rule out. They decide what is fused, not whether it is right: that it is on any path.
    """
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and (value := _value(node.test, me, module)) is not UNKNOWN:
        children = [node.test, *(node.body if value else node.orelse)]
    for child in children:
        yield from reached(child, me, module)


def _value(node: ast.expr, me: str, module: nn.Module) -> object:
    """Of an expression, as far as it depends on settings and children of module alone."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == me:
        return _setting(node.attr, module)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, me, module)
        return UNKNOWN if value is UNKNOWN else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(operand, me, module) for operand in node.values]
        deciding = isinstance(node.op, ast.Or)
        if any(value is not UNKNOWN and bool(value) is deciding for value in values):
            return deciding
        return UNKNOWN if UNKNOWN in values else not deciding
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        operands = [_value(operand, me, module) for operand in (node.left, *node.comparators)]
        if UNKNOWN not in operands:
            try:
                return bool(COMPARISONS[type(node.ops[0])](*operands))
            except TypeError:
                return UNKNOWN
    return UNKNOWN


def _setting(name: str, module: nn.Module) -> object:
    """An attribute of module, where looking runs no code and it does not change by design."""
    for owner in (module.__dict__, module._modules):
        if name in owner and name != "training":
            value = owner[name]
            plain = value is None or isinstance(value, bool | int | float | str)
            child = isinstance(value, nn.Module) and not hasattr(type(value), "__len__")
            return value if plain or child else UNKNOWN
    return UNKNOWN
