"""The last GPU run was of the present kernels and found nothing wrong (tools/gpu_record.py)."""

from __future__ import annotations

import json
import warnings
from typing import Any

import gpu_record
import pytest
from kernel_hash import kernel_hash

GOOD: dict[str, Any] = {
    "status": "passed",
    "hash": "h",
    "passed": 10,
    "failed": 0,
    "skipped": 1,
    "sanitizer": {"memcheck": 0, "racecheck": 0},
}
PENDING = {"status": "pending", "reason": "none was free", "hash": "h"}


def test_the_record_is_good() -> None:
    assert gpu_record.PATH.exists(), "no tests/gpu_record.json: make gpu-test or make gpu-pending"
    record = json.loads(gpu_record.PATH.read_text("utf-8"))
    faults = gpu_record.faults(record, kernel_hash())
    assert not faults, f"tests/gpu_record.json: {'; '.join(faults)}: run make gpu-test on a GPU"
    if record["status"] == "pending":
        warnings.warn(
            f"the GPU record of these kernels is pending: {record['reason']}", stacklevel=1
        )


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
        (GOOD | {"sanitizer": {"memcheck": 3, "racecheck": 0}}, "memcheck: 3 errors"),
        (GOOD | {"sanitizer": {"memcheck": 0, "racecheck": None}}, "racecheck: None errors"),
        (GOOD | {"sanitizer": {"memcheck": 0}}, "racecheck: not run"),
        ({}, "status is None"),
    ],
)
def test_faults(record: dict[str, Any], fault: str) -> None:
    assert fault in "; ".join(gpu_record.faults(record, "h"))
