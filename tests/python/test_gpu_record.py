"""The last GPU run was of the present kernels and found nothing wrong (tools/gpu_record.py)."""

from __future__ import annotations

import json
import warnings
from typing import Any

import cases
import gpu_record
import pytest
from kernel_hash import kernel_hash

NO_ERRORS = dict.fromkeys(gpu_record.SANITIZER_TOOLS, 0)
GOOD: dict[str, Any] = {
    "status": "passed",
    "hash": "h",
    "passed": 10,
    "failed": 0,
    "skipped": 1,
    "sanitizer": NO_ERRORS,
    "cases": {},
}
FAILED = {"passed": 3, "failed": 1, "skipped": 0}
PENDING = {"status": "pending", "reason": "none was free", "hash": "h"}


def the_record() -> dict[str, Any]:
    assert gpu_record.PATH.exists(), "no tests/gpu_record.json: make gpu-test or make gpu-pending"
    return json.loads(gpu_record.PATH.read_text("utf-8"))


@pytest.fixture
def run_record() -> dict[str, Any]:
    """The record, where it is not pending."""
    found = the_record()
    if found["status"] == "pending":
        pytest.skip(f"needs a GPU record: it is pending, {found['reason']}")
    return found


def test_the_record_is_good() -> None:
    record = the_record()
    faults = gpu_record.faults(record, kernel_hash())
    assert not faults, f"tests/gpu_record.json: {'; '.join(faults)}: run make gpu-test on a GPU"
    if record["status"] == "pending":
        warnings.warn(
            f"the GPU record of these kernels is pending: {record['reason']}", stacklevel=1
        )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_case_44_the_checker_found_nothing(tool: str, run_record: dict[str, Any]) -> None:
    assert run_record["sanitizer"].get(tool, "not run") == 0, "run make gpu-test on a GPU"


def test_every_case_with_a_test_for_a_gpu_is_in_the_record(
    request: pytest.FixtureRequest, run_record: dict[str, Any]
) -> None:
    """Of the tests that are collected now: each case had one that passed, and none that failed."""
    counts = cases.from_json(run_record.get("cases", {}))
    for item in request.session.items:
        number = cases.case_of(item.name)
        if number is None or not item.get_closest_marker("gpu"):
            continue
        found = counts.get(number, cases.Counts())
        one_gpu_was_too_few = item.get_closest_marker("two_gpus") and found.skipped > 0
        if not one_gpu_was_too_few:
            assert found.passed > 0, f"case {number} ({item.name}): run make gpu-test on a GPU"
        assert found.failed == 0, f"case {number} failed on a GPU"


@pytest.mark.parametrize("record", [GOOD, PENDING])
def test_good_records(record: dict[str, Any]) -> None:
    assert gpu_record.faults(record, "h") == []


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (GOOD | {"hash": "old"}, "kernels of hash old"),
        (PENDING | {"hash": "old"}, "kernels of hash old"),
        (PENDING | {"reason": ""}, "without a reason"),
        (GOOD | {"status": "failed", "failed": 2}, "'failed'"),
        (GOOD | {"failed": 2, "failed_tests": ["a", "b"]}, "failed: 2"),
        (GOOD | {"passed": 0}, "no test passed"),
        (GOOD | {"sanitizer": NO_ERRORS | {"memcheck": 3}}, "memcheck: 3 errors"),
        (GOOD | {"sanitizer": NO_ERRORS | {"racecheck": None}}, "racecheck: None errors"),
        (GOOD | {"sanitizer": {"memcheck": 0, "racecheck": 0}}, "initcheck: not run"),
        (GOOD | {"sanitizer": {"memcheck": 0, "racecheck": 0}}, "synccheck: not run"),
        (GOOD | {"cases": {"7": FAILED}}, "case 7: 1 failed"),
        ({name: GOOD[name] for name in GOOD if name != "cases"}, "no counts of the hostile cases"),
        ({}, "status is None"),
    ],
)
def test_faults(record: dict[str, Any], fault: str) -> None:
    assert fault in "; ".join(gpu_record.faults(record, "h"))
