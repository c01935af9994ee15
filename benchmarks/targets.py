"""What gnsilu's speed must reach and what it aims at, and what measured figures make of it.

A row is what speed.py writes of one shape and type. Ratios are those of medians, cold L2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
COPIES = ("copy", "copy_kernel")

Row = dict[str, Any]


def ruler(row: Row, state: str = "cold") -> float:
    """Microseconds of the faster of the two copies, the driver's and a kernel's."""
    return float(min(row[state][name]["median"] for name in COPIES))


def ratio(row: Row, contender: str, against: str | None = None, state: str = "cold") -> float:
    """Time of the contender over another's, or over the copy; NaN where one was not measured."""
    times = row[state] or {}
    if contender not in times or (against is not None and against not in times):
        return math.nan
    base = ruler(row, state) if against is None else float(times[against]["median"])
    return float(times[contender]["median"]) / base


def of_copy(row: Row) -> float:
    return ratio(row, "gnsilu")


def of_other(name: str) -> Callable[[Row], float]:
    return lambda row: ratio(row, "gnsilu", name)


def host_of_clone(row: Row) -> float:
    host = row["host"]
    return math.nan if host is None else float(host["gnsilu"]["median"] / host["clone"]["median"])


def memory(row: Row) -> float:
    return float(row["memory_bytes"])


# ------------------------------------------------------------------------------------ classes


def is_large(row: Row) -> bool:
    return bool(row["bytes"] >= 64 * MIB)


def is_small(row: Row) -> bool:
    return bool(row["bytes"] < 8 * MIB)


def is_odd(row: Row) -> bool:
    return math.prod(row["shape"][2:]) % 2 == 1


def has_large_groups(row: Row) -> bool:
    """Beyond what the shared memory of a GPU holds beside the rest."""
    return bool(row["group_bytes"] > 20e6)


@dataclass(frozen=True)
class Target:
    """The worst value over the rows of a class is to be at most `must`, better at most `goal`."""

    title: str
    belongs: Callable[[Row], bool]
    value: Callable[[Row], float]
    must: float
    goal: float | None = None  # None: nothing beyond
    unit: str = "x"

    def shown(self, value: float | None) -> str:
        if value is None:
            return ""
        if math.isnan(value):
            return "not measured"
        return f"x{value:.2f}" if self.unit == "x" else f"{value / 1024:.1f} KiB"


TARGETS = [
    Target(
        "64 MiB and up, group up to 20 MB",
        lambda row: is_large(row) and not has_large_groups(row), of_copy, 1.20, 1.10,
    ),
    Target(
        "64 MiB and up, group beyond that",
        lambda row: is_large(row) and has_large_groups(row), of_copy, 1.35, 1.20,
    ),
    Target(
        "8 to 64 MiB",
        lambda row: not is_large(row) and not is_small(row), of_copy, 1.90, 1.40,
    ),
    Target(
        "8 to 64 MiB, of torch.compile",
        lambda row: not is_large(row) and not is_small(row), of_other("compiled"), 1.0,
    ),
    Target("below 8 MiB", lambda row: is_small(row) and not is_odd(row), of_copy, 2.0, 1.5),
    Target("below 8 MiB, H*W odd", lambda row: is_small(row) and is_odd(row), of_copy, 2.2, 1.5),
    Target("below 8 MiB, of torch.compile", is_small, of_other("compiled"), 1.0),
    Target("below 8 MiB, of PyTorch, autocast", is_small, of_other("autocast"), 1.0),
    Target("below 8 MiB, of PyTorch, 16-bit", is_small, of_other("eager_16_bit"), 1.0),
    Target("host time of a call, of x.clone()'s", is_small, host_of_clone, 1.3, 1.0),
    Target("memory beyond the result", lambda row: True, memory, 1 * MIB, 256 * 1024, "bytes"),
]  # fmt: skip


# ---------------------------------------------------------------------------------- judgement


@dataclass(frozen=True)
class Verdict:
    target: Target
    shapes: int  # measured
    worst: float  # NaN where none was
    at: str

    @property
    def word(self) -> str:
        """What became of it; of a figure that was not taken nothing is said."""
        if math.isnan(self.worst):
            return "not measured"
        if self.worst > self.target.must:
            return "FAIL"
        met = self.target.goal is None or self.worst <= self.target.goal
        return "goal" if met and self.target.goal is not None else "pass"

    def cells(self) -> list[str]:
        """Class, measured, at, must, goal, verdict."""
        target = self.target
        return [
            target.title, target.shown(self.worst), self.at,
            target.shown(target.must), target.shown(target.goal), self.word,
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.target.title, "shapes": self.shapes, "at": self.at,
            "worst": None if math.isnan(self.worst) else self.worst,
            "must": self.target.must, "goal": self.target.goal, "verdict": self.word,
        }  # fmt: skip


HEADINGS = ("class", "worst", "at", "must", "goal", "verdict")


def judge(rows: list[Row]) -> list[Verdict]:
    verdicts = []
    for target in TARGETS:
        values = [(target.value(row), row) for row in rows if target.belongs(row)]
        measured = [(value, row) for value, row in values if not math.isnan(value)]
        worst, at = math.nan, ""
        if measured:
            worst, row = max(measured, key=lambda item: item[0])
            at = f"{'x'.join(map(str, row['shape']))} {row['dtype']}"
        verdicts.append(Verdict(target, len(measured), worst, at))
    return verdicts
