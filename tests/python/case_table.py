"""`pytest --cases`: a table of the hostile cases (docs/cases.md) below pytest's summary.

A row a case: its tests here, what came out of them, and what the last run on a GPU had found
(tests/gpu_record.json). A failure, or a case without a test, makes the run fail.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cases
import gpu_record
import pytest
from cases import Counts

HEAD = "case                                             tests   passed failed skipped"
GPU_HEAD = "   GPU: passed failed skipped"
NO_TEST, FAILED, NOT_RUN = "no test", "failed", "not run"
_WORSE = {"passed": 0, "skipped": 1, "failed": 2}


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", action="store_true", help="end with a table of the hostile cases; all need tests"
    )


def register(config: pytest.Config) -> None:
    if config.getoption("--cases"):
        config.pluginmanager.register(CaseTable(cases.DOCUMENT, gpu_record.PATH), "case-table")


@dataclass
class Row:
    number: int
    title: str
    here: Counts
    gpu: Counts | None  # None where there is no record

    @property
    def mark(self) -> str:
        """What is wrong with it; empty where all is well."""
        gpu = self.gpu or Counts()
        if self.here.all == 0:
            return NO_TEST
        if self.here.failed or gpu.failed:
            return FAILED
        return "" if self.here.passed or gpu.passed else NOT_RUN

    @property
    def is_fault(self) -> bool:
        return self.mark in (NO_TEST, FAILED)

    def __str__(self) -> str:
        text = f"{self.number:4}  {self.title:42} {self.here.all:5}   {_columns(self.here)}"
        if self.gpu is not None:
            text += f"        {_columns(self.gpu)}"
        return f"{text}   {f'<- {self.mark}' if self.mark else ''}".rstrip()


def _columns(counts: Counts) -> str:
    figures = (counts.passed, counts.failed, counts.skipped)
    return "{:>6} {:>6} {:>7}".format(*(figure or "." for figure in figures))


def rows_of(
    titles: Mapping[int, str], here: Mapping[int, Counts], gpu: Mapping[int, Counts] | None
) -> list[Row]:
    """In the order of the document; a number that it lacks comes last."""
    names = dict(titles) | {n: "(not in docs/cases.md)" for n in sorted(here) if n not in titles}
    return [
        Row(n, title, here.get(n, Counts()), None if gpu is None else gpu.get(n, Counts()))
        for n, title in names.items()
    ]


@dataclass
class CaseTable:
    document: Path
    record: Path
    numbers: dict[str, int] = field(default_factory=dict)  # of the collected tests
    outcomes: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            number = cases.case_of(item.name)
            if number is not None:
                self.numbers[item.nodeid] = number

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.numbers:
            return
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, report.outcome, key=_WORSE.__getitem__)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        here: dict[int, Counts] = defaultdict(Counts)
        for nodeid, number in self.numbers.items():
            here[number].add(self.outcomes.get(nodeid, "skipped"))
        try:
            self.read = json.loads(self.record.read_text("utf-8"))
        except (OSError, ValueError):
            self.read = {}
        gpu = cases.from_json(self.read["cases"]) if "cases" in self.read else None
        titles = cases.read_titles(self.document.read_text("utf-8"))
        self.rows = rows_of(titles, here, gpu)
        if session.exitstatus == pytest.ExitCode.OK and any(row.is_fault for row in self.rows):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("hostile cases")
        has_record = any(row.gpu is not None for row in self.rows)
        terminalreporter.line(HEAD + (GPU_HEAD if has_record else ""))
        for row in self.rows:
            terminalreporter.line(str(row), red=row.is_fault, yellow=row.mark == NOT_RUN)
        for line in self.closing_lines(has_record):
            terminalreporter.line(line)

    def closing_lines(self, has_record: bool) -> list[str]:
        faults = [row for row in self.rows if row.is_fault]
        marks = (NO_TEST, FAILED, NOT_RUN)
        counts = {mark: sum(row.mark == mark for row in self.rows) for mark in marks}
        faulty = ", ".join(f"{mark}: {count}" for mark, count in counts.items() if count)
        lines = [f"{len(self.rows)} cases" + (f"; {faulty}" if faulty else ", each with its tests")]
        if has_record:
            lines.append(f"GPU: {self.read.get('gpu')}, {self.read.get('date')}")
        else:
            reason = self.read.get("reason", "tests/gpu_record.json has none")
            lines.append(f"no figures of a GPU: {reason}")
        if faults:
            lines.append("the run fails: " + ", ".join(str(row.number) for row in faults))
        return lines
