"""Small modules with GroupNorm and SiLU: what gnsilu.patch has to see through."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu


class Block(nn.Module):
    """A GroupNorm, another, SiLU and what else may stand around them."""

    def __init__(self, **settings):
        super().__init__()
        self.norm, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, eps=1e-3)
        self.act, self.dropout, self.conv = nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(4, 4, 1)
        for name, value in settings.items():
            if name in self._modules and not isinstance(value, nn.Module):
                delattr(self, name)
            setattr(self, name, value)
        for norm in (self.norm, self.norm2):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)


class Nested(Block):
    def forward(self, x):
        return self.conv(self.act(self.norm2(self.conv(F.silu(self.norm(x))))))


class Reassigned(Block):
    def forward(self, x):
        h = self.norm(x)
        x = x + 1  # x, not h
        h = torch.nn.functional.silu(h, inplace=True)
        y: Tensor = self.norm2(h)
        z = silu(y)
        return z + x


class SharedActivation(Block):
    """In place, used at two sites and on another value in between."""

    def forward(self, x):
        temb = x.mean(dim=(2, 3), keepdim=True)
        h = self.norm(x)
        temb = self.act(temb)
        h = self.act(h)
        h = self.norm2(h + temb)
        h = self.act(h)
        return self.act(h - 1)


class Residual(Block):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        z = self.norm2(x)
        return y + h + self.act(z) * self.act(z)


class Between(Block):
    def forward(self, x):
        h = self.norm(x)
        h = self.dropout(h)
        h = self.act(h)
        h = self.norm2(h)
        h = h * 2 + 1
        return self.act(h)


class SomeBranch(Block):
    """SiLU on one path only."""

    def forward(self, x, flag=False):
        h = self.norm(x)
        if flag:
            h = self.act(h)
        y = self.norm2(x)
        if not flag:
            return self.act(y) * h
        return y


class EveryBranch(Block):
    def forward(self, x, flag=0):
        if flag == 0:
            h = self.norm(x)
        elif flag == 1:
            h = self.conv(x)
        else:
            h = self.norm2(x)
        h = self.act(h)
        return self.conv(h)


class AnotherValue(Block):
    """Something between a branch and SiLU, which then may get the norm's result or another."""

    def forward(self, x, flag=False):
        h = x
        if flag:
            h = self.norm(x)
        x = x + 1
        return self.act(h) + x + self.act(self.norm2(x))


class Setting(Block):
    def forward(self, x):
        if self.mode == "default":
            h = self.norm(x)
        elif self.mode == "scale" and self.dropout is not None:
            h = self.norm(x)
            h = h * 2
        else:
            raise ValueError(self.mode)
        h = self.act(h)
        if self.extra:
            return self.norm2(h)
        return h


class Loop(Block):
    def forward(self, x):
        for _ in range(2):
            h = self.norm(x)
            x = self.act(h)
        h = self.norm2(x)
        for _ in range(2):
            x = x + self.act(h)
        return x


class InPlaceInLoop(Block):
    """y would be the same tensor as h."""

    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        for _ in range(2):
            h += 1
        g = self.norm2(y)
        z = self.act(g)
        g -= 1
        return y + z


class LoopInOneExpression(Block):
    def forward(self, x):
        for _ in range(2):
            x = self.act(self.norm(x))
        return torch.stack([self.act(self.norm2(part)) for part in (x, x + 1)])


class Statements(Block):
    def forward(self, x):
        with torch.no_grad():
            h = self.norm(x)
        h = self.act(h)
        g = self.norm2(x)
        try:
            y = self.act(g)
        except ValueError:
            y = g
        return y + h


class Comprehension(Block):
    """What a comprehension iterates over is read where it stands, not in a scope of its own."""

    def forward(self, x):
        h = x + 1
        if any(size == 7 for size in h.shape):
            return h
        h = self.act(self.norm(h))
        h = self.norm2(h)
        h = self.act(h)
        return torch.stack([h for _ in range(2)])


class NestedScope(Block):
    def forward(self, x):
        h = self.norm(x)
        later = lambda: h.mean()  # noqa: E731
        y = self.act(h)
        g = (z := self.norm2(x))
        return y + later() + self.act(g) + z


class Called(Block):
    """By keyword, with arguments that GroupNorm does not take, and twice."""

    def forward(self, x):
        h = self.norm(input=x)
        h = self.act(h)
        y = self.norm2(h)
        y = self.act(y)
        if x is None:
            y = self.norm2(h, x)
        return y + self.act(self.norm2(x))


class CalledWithin(Block):
    """By keyword, and unpacked, as SiLU's argument."""

    def forward(self, x):
        h = self.act(self.norm(input=x))
        arguments = {"input": h}
        return self.act(self.norm2(**arguments))


class NewArguments(Nested):
    """Made anew by arguments of its own."""

    def __new__(cls, made_with=None):
        self = super().__new__(cls)
        object.__setattr__(self, "made_with", made_with)
        return self

    def __getnewargs__(self):
        return ("made with this",)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "made_with"}


class NewKeywords(NewArguments):
    def __getnewargs_ex__(self):
        return (), {"made_with": "made with this"}


class TwoReaders(Block):
    def forward(self, x):
        h = self.norm(x)
        a, b = self.act(h), self.act(h)
        return self.act(self.norm2(a)) + self.norm2(b)


class Locals(Block):
    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return self.act(self.norm2(locals()["h"]))


class Private(Block):
    def forward(self, x):
        self.__seen = x.shape
        return self.act(self.norm(x)) + self.act(self.norm2(x))


class Inherited(Nested):
    def forward(self, x):
        return super().forward(x) + 1

    def unused(self, x):
        return self.act(x)


class Super(Nested):
    def forward(self, x):
        h = super().forward(x)
        return self.act(self.norm(h))


def scaled(factor):
    def decorator(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            return method(self, *args, **kwargs) * factor

        return wrapper

    return decorator


class Decorated(Block):
    @torch.no_grad()
    @scaled(3)
    def forward(self, x):
        return self.act(self.norm(x)) + self.act(self.norm2(x))


class Zipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(4, 4)])
        self.acts = nn.ModuleList([nn.SiLU(), nn.SiLU()])

    def forward(self, x):
        for norm, act in zip(self.norms, self.acts, strict=True):
            x = act(norm(x))
        return x


class OwnForward(nn.GroupNorm):
    def forward(self, input):
        return super().forward(input) * 2


class NoForward(nn.GroupNorm):
    pass


class Property(Block):
    """Not the child of this name."""

    @property
    def norm(self):
        return self._modules["norm2"]

    def forward(self, x):
        return self.act(self.norm(x)) + self.act(self.norm2(x))


def double(module, arguments, y):
    return y * 2


def hooked(attribute):
    model = Nested()
    getattr(model, attribute).register_forward_hook(double)
    return model


def replaced():
    model = Nested()
    model.forward = lambda x: x
    return model


def parametrised(what):
    model = Nested()
    model.scale = nn.Parameter(torch.ones(1))
    module, name = (model.norm, "weight") if what == "norm" else (model, "scale")
    nn.utils.parametrize.register_parametrization(module, name, nn.Tanh())
    return model


def shared():
    model = Nested()
    return nn.ModuleList([model, model.norm])


def uninitialised():
    model = Nested()
    model.norm.weight = nn.UninitializedParameter()
    return model


def registering():
    class Registering(Nested):
        def __init_subclass__(cls):
            raise AssertionError("a subclass was made")

    return Registering()


def made_by_exec():
    """From source that nobody kept."""
    names = {"Block": Block}
    exec("class Made(Block):\n def forward(self, x): return self.act(self.norm(x))", names)
    return names["Made"]()


def made_elsewhere():
    """From other source than the file has."""

    class Elsewhere(Nested):
        pass

    source = Nested.forward
    changed = source.__code__.replace(co_consts=("another", *source.__code__.co_consts[1:]))
    Elsewhere.forward = type(source)(changed, source.__globals__)
    return Elsewhere()
