"""The hostile cases: docs/cases.md lists them, each has its tests, `--cases` shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import cases
import pytest
from case_table import rows_of
from cases import Counts

pytest_plugins = ["pytester"]

NUMBERS = list(range(1, 53))
SOURCES = sorted(Path(__file__).parent.glob("test_*.py"))


def test_the_document_lists_each_case_once_and_in_order() -> None:
    titles = cases.read_titles(cases.DOCUMENT.read_text("utf-8"))
    assert list(titles) == NUMBERS
    assert len(set(titles.values())) == len(NUMBERS)
    assert max(map(len, titles.values())) <= 42  # what the table has room for


@pytest.mark.parametrize("number", NUMBERS)
def test_the_case_has_a_test(number: int) -> None:
    pattern = re.compile(rf"^def test_case_{number:02}_", re.MULTILINE)
    found = [path.name for path in SOURCES if pattern.search(path.read_text("utf-8"))]
    assert found, f"no test is named test_case_{number:02}_..."


def test_no_test_bears_a_number_that_is_no_case() -> None:
    pattern = re.compile(r"^ *def (test_?case_?\d*\w*)", re.MULTILINE)
    names = [name for path in SOURCES for name in pattern.findall(path.read_text("utf-8"))]
    assert len(names) > len(NUMBERS)
    ours = [name for name in names if re.match(r"test_?case_?\d", name)]
    assert [name for name in ours if cases.case_of(name) not in NUMBERS] == []


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("test_case_07_silu_tail", 7),
        ("test_case_52_x[cpu-test_case_01_y]", 52),
        ("test_case_7_x", None),
        ("test_case_073_x", None),
        ("test_silu_tail", None),
        ("my_test_case_07_x", None),
    ],
)
def test_the_number_in_a_name(name: str, number: int | None) -> None:
    assert cases.case_of(name) == number


def test_two_rows_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="case 1 has two rows"):
        cases.read_titles("| 1 | **One.** x | y |\n| 1 | **Another.** x | y |\n")


# --- The table ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "gpu", "mark", "is_fault"),
    [
        (Counts(passed=2), None, "", False),
        (Counts(passed=2, skipped=1), Counts(passed=3), "", False),
        (Counts(skipped=1), Counts(passed=1), "", False),
        (Counts(skipped=1), Counts(skipped=1), "not run", False),
        (Counts(skipped=1), None, "not run", False),
        (Counts(), Counts(passed=1), "no test", True),
        (Counts(passed=2, failed=1), Counts(passed=3), "failed", True),
        (Counts(passed=2), Counts(passed=3, failed=1), "failed", True),
    ],
)
def test_the_mark_of_a_row(here: Counts, gpu: Counts | None, mark: str, is_fault: bool) -> None:
    (row,) = rows_of({7: "Seven"}, {7: here}, None if gpu is None else {7: gpu})
    assert (row.mark, row.is_fault) == (mark, is_fault)
    assert ("<- " + mark in str(row)) == bool(mark)


def test_a_number_that_the_document_lacks_has_a_row() -> None:
    rows = rows_of({1: "One"}, {1: Counts(passed=1), 60: Counts(passed=1)}, None)
    assert [(row.number, row.title) for row in rows] == [(1, "One"), (60, "(not in docs/cases.md)")]


CONFTEST = """
import case_table
from pathlib import Path

FOLDER = Path(__file__).parent

def pytest_addoption(parser):
    case_table.add_option(parser)

def pytest_configure(config):
    if config.getoption("--cases"):
        table = case_table.CaseTable(FOLDER / "cases.md", FOLDER / "record.json")
        config.pluginmanager.register(table)
"""
DOCUMENT = """
| case | elsewhere | here |
| --- | --- | --- |
| 1 | **One.** x | y |
| 2 | **Two.** x | y |
| 3 | **Three.** x | y |
"""
GOOD_TESTS = """
import pytest

@pytest.mark.parametrize("x", [1, 2, 3])
def test_case_01_a(x): pass
def test_case_01_b(): pytest.skip("needs x")
def test_case_02_a(): pass
def test_case_03_a(): pytest.skip("needs x")
def test_of_no_case(): pass
"""
RECORD = {
    "gpu": "NVIDIA Invented",
    "date": "2026-01-31",
    "cases": {"1": {"passed": 9, "failed": 0, "skipped": 8}},
}


def table_of(
    pytester: pytest.Pytester, tests: str, record: object = RECORD, option: str = "--cases"
) -> tuple[int, dict[str, str], str]:
    """Exit status of a run, the cells of the table's rows by number, and all that was printed."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=tests)
    Path(pytester.path, "cases.md").write_text(DOCUMENT, "utf-8")
    if record is not None:
        Path(pytester.path, "record.json").write_text(json.dumps(record), "utf-8")
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # which takes seconds
    result = pytester.runpytest_inprocess(option, "-q", *without)
    rows = [line.split(maxsplit=2) for line in result.outlines if re.match(r" +\d+  \w", line)]
    return int(result.ret), {row[0]: " ".join(row[2].split()) for row in rows}, str(result.stdout)


def test_the_table_counts_here_and_on_a_gpu(pytester: pytest.Pytester) -> None:
    status, rows, output = table_of(pytester, GOOD_TESTS)
    assert status == 0
    assert rows == {
        "1": "4 3 . 1 9 . 8",
        "2": "1 1 . . . . .",
        "3": "1 . . 1 . . . <- not run",
    }
    assert "3 cases; not run: 1" in output
    assert "GPU: NVIDIA Invented, 2026-01-31" in output


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "tests/gpu_record.json has none"),
        ({"passed": 9}, "tests/gpu_record.json has none"),
        ({"status": "pending", "reason": "none was free"}, "none was free"),
    ],
)
def test_the_table_without_figures_of_a_gpu(
    pytester: pytest.Pytester, record: object, reason: str
) -> None:
    status, rows, output = table_of(pytester, GOOD_TESTS, record)
    assert status == 0
    assert rows["1"] == "4 3 . 1"
    assert f"no figures of a GPU: {reason}" in output


def test_a_case_without_a_test_fails_the_run(pytester: pytest.Pytester) -> None:
    tests = GOOD_TESTS.replace("test_case_02_a", "test_two")
    status, rows, output = table_of(pytester, tests)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert rows["2"] == "0 . . . . . . <- no test"
    assert "the run fails: 2\n" in output
    assert table_of(pytester, tests, option="--quiet")[:2] == (0, {})


@pytest.mark.parametrize(
    "body",
    [
        "def test_case_02_a(): assert 0",
        "@pytest.fixture\ndef broken(): assert 0\ndef test_case_02_a(broken): pass",
        "@pytest.fixture\ndef broken():\n  yield\n  assert 0\ndef test_case_02_a(broken): pass",
    ],
    ids=["call", "setup", "teardown"],
)
def test_a_failure_is_marked(pytester: pytest.Pytester, body: str) -> None:
    status, rows, _ = table_of(pytester, GOOD_TESTS.replace("def test_case_02_a(): pass", body))
    assert status == pytest.ExitCode.TESTS_FAILED
    assert rows["2"] == "1 . 1 . . . . <- failed"


def test_a_failure_on_the_gpu_fails_the_run(pytester: pytest.Pytester) -> None:
    record = RECORD | {"cases": {"2": {"passed": 9, "failed": 1, "skipped": 0}}}
    status, rows, _ = table_of(pytester, GOOD_TESTS, record)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert rows["2"] == "1 1 . . 9 1 . <- failed"
