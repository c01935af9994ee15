"""tools/gpu_test.py: what it makes of reports and of the memory checkers, invented ones here."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import cases
import gpu_record
import gpu_test
import pytest
from cases import Counts

PYTEST_REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="1" skipped="2">
<testcase classname="tests.python.test_values" name="test_case_07_silu_tail[cpu]" time="0.1" />
<testcase classname="tests.python.test_values" name="test_case_07_silu_tail[cuda]" time="0.1" />
<testcase classname="tests.python.test_values" name="test_case_07_other[&quot;&lt;x&gt;]">
  <failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="tests.python.test_cuda" name="test_case_41_another_device">
  <skipped type="pytest.skip" message="needs two CUDA GPUs: 1 here">where</skipped></testcase>
<testcase classname="tests.python.test_cuda" name="test_case_52_build">
  <error message="failed on setup">long</error></testcase>
<testcase classname="tests.python.test_module" name="test_of_no_case" />
<testcase classname="tests.python.test_module" name="test_case_without_a_number" />
<testcase classname="tests.python.test_module" name="other_test_case_01_x"><skipped /></testcase>
</testsuite></testsuites>
"""
GOOGLE_REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="Choose">
<testcase name="Takes" status="run" result="completed" classname="Choose" />
<testcase name="test_case_01_no" status="run" result="completed" classname="Choose">
  <failure message="no" type=""></failure></testcase>
<testcase name="Off" status="notrun" result="suppressed" classname="Choose" />
</testsuite></testsuites>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.xml"
    path.write_text(PYTEST_REPORT, "utf-8")
    return path


def test_outcomes_of_a_report_are_counted(report: Path) -> None:
    outcome = gpu_test.Outcome()
    outcome.add_junit(report, "pytest")
    assert outcome.passed == 4
    assert outcome.failed == [
        'pytest tests.python.test_values.test_case_07_other["<x>]',
        "pytest tests.python.test_cuda.test_case_52_build",
    ]
    assert outcome.skipped == {"needs two CUDA GPUs: 1 here": 1, "no reason given": 1}


def test_outcomes_of_googletest_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "google.xml"
    path.write_text(GOOGLE_REPORT, "utf-8")
    outcome = gpu_test.Outcome()
    outcome.add_junit(path, "choose_test")
    assert outcome.passed == 1
    assert outcome.failed == ["choose_test Choose.test_case_01_no"]
    assert outcome.skipped == {"disabled in the source": 1}


def test_outcomes_are_counted_by_case(report: Path) -> None:
    counts = cases.counts_in_junit(report)
    assert counts == {7: Counts(2, 1, 0), 41: Counts(0, 0, 1), 52: Counts(0, 1, 0)}
    document = json.loads(json.dumps(cases.to_json(counts)))
    assert list(document) == ["7", "41", "52"]
    assert document["7"] == {"passed": 2, "failed": 1, "skipped": 0}
    assert cases.from_json(document) == counts


def test_a_program_that_does_not_end_is_ended() -> None:
    assert gpu_test.run(["sleep", "0"], 10) == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert gpu_test.run(["sleep", "60"], 0.1) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


# --- The memory checkers ------------------------------------------------------------------------

# Each waits until all four have begun, and fails where that is never so.
CHECKER = """#!/bin/sh
[ "$1" = --tool ] && [ "$3" = --port ] && [ -x "$5" ] && [ "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] ||
  exit 3
mkdir "$FOLDER/port $4" && touch "$FOLDER/$2.begun" || exit 4
for i in $(seq 200); do
  [ $(ls "$FOLDER" | grep -c begun) -eq 4 ] && break
  sleep 0.05
done
[ $(ls "$FOLDER" | grep -c begun) -eq 4 ] || exit 5
echo "this is $2, of $(basename "$6")"
case $2 in
racecheck) echo "========= RACECHECK SUMMARY: ${RACES:-0} hazards displayed (0 errors, ...)" ;;
synccheck) [ "$SILENT" ] || echo "========= ERROR SUMMARY: 0 errors" ;;
initcheck) echo "========= ERROR SUMMARY: ${ERRORS:-0} errors" >&2 ;;
memcheck) echo "========= ERROR SUMMARY: 0 errors"; exit ${STATUS:-0} ;;
esac
"""


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(CHECKER)
    program.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(tmp_path / "scratch"))
    return monkeypatch


def test_the_checkers_run_at_once_and_are_shown_in_turn(
    checker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = gpu_test.Outcome(by_case={44: Counts(passed=1)})
    found = gpu_test.run_sanitizers(outcome)
    assert found == {"memcheck": 0, "racecheck": 0, "initcheck": 0, "synccheck": 0}
    assert (outcome.passed, outcome.failed) == (4, [])
    assert outcome.by_case == {44: Counts(passed=5)}
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("this is")]
    assert shown == [f"this is {tool}, of sanitizer_shapes.py" for tool in found]


@pytest.mark.parametrize(
    ("name", "value", "tool", "errors", "status"),
    [
        ("RACES", "2", "racecheck", 2, 0),
        ("ERRORS", "13", "initcheck", 13, 0),
        ("SILENT", "1", "synccheck", None, 0),
        ("STATUS", "1", "memcheck", 0, 1),
    ],
)
def test_what_a_checker_finds_is_a_failure(
    checker: pytest.MonkeyPatch, name: str, value: str, tool: str, errors: int | None, status: int
) -> None:
    checker.setenv(name, value)
    outcome = gpu_test.Outcome()
    found = gpu_test.run_sanitizers(outcome)
    assert found == {**dict.fromkeys(gpu_record.SANITIZER_TOOLS, 0), tool: errors}
    assert outcome.failed == [f"compute-sanitizer {tool}: {errors} errors, exit status {status}"]
    assert outcome.by_case == {44: Counts(passed=3, failed=1)}


def test_checkers_that_are_missing_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_test, "find_sanitizer", lambda: None)
    outcome = gpu_test.Outcome()
    assert gpu_test.run_sanitizers(outcome) == dict.fromkeys(gpu_record.SANITIZER_TOOLS)
    assert outcome.failed == ["compute-sanitizer: not found in PATH or CUDA_HOME/bin"]
