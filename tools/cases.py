"""The hostile cases: their titles in docs/cases.md, the tests that bear their numbers, counts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "cases.md"
_TEST = re.compile(r"test_case_(\d\d)_")
_ROW = re.compile(r"\| (\d+) \| \*\*(.+?)\.\*\* ")


def case_of(test_name: str) -> int | None:
    """The number in a test's name, such as 7 in "test_case_07_silu_tail[cpu]"."""
    match = _TEST.match(test_name)
    return int(match[1]) if match else None


def read_titles(text: str) -> dict[int, str]:
    """Number and short title of each row of the tables in docs/cases.md, in their order."""
    found: dict[int, str] = {}
    for match in map(_ROW.match, text.splitlines()):
        if match is None:
            continue
        number = int(match[1])
        if number in found:
            raise ValueError(f"case {number} has two rows")
        found[number] = match[2]
    return found


@dataclass
class Counts:
    """Outcomes of a case's tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def all(self) -> int:
        return self.passed + self.failed + self.skipped

    def add(self, outcome: str) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)


def outcome_of(testcase: ElementTree.Element) -> str:
    """ "passed", "failed" or "skipped", of a test in a report in JUnit's XML."""
    if testcase.find("failure") is not None or testcase.find("error") is not None:
        return "failed"
    if testcase.find("skipped") is not None or testcase.get("result") == "suppressed":
        return "skipped"
    return "passed"


def counts_in_junit(path: Path) -> dict[int, Counts]:
    """Outcomes by case in pytest's report; tests that belong to no case are left out."""
    found: dict[int, Counts] = defaultdict(Counts)
    for testcase in ElementTree.parse(path).iter("testcase"):
        number = case_of(testcase.get("name", ""))
        if number is not None:
            found[number].add(outcome_of(testcase))
    return dict(found)


def to_json(counts: dict[int, Counts]) -> dict[str, dict[str, int]]:
    return {str(number): asdict(counts[number]) for number in sorted(counts)}


def from_json(document: dict[str, Any]) -> dict[int, Counts]:
    return {int(number): Counts(**counts) for number, counts in document.items()}
