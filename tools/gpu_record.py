"""tests/gpu_record.json: what the last run of the tests on a GPU found, and on which kernels.

CI has no GPU. It checks that this record is about the kernels as they are now, and that nothing
failed. Where no GPU could be had, `python tools/gpu_record.py pending REASON` says so in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from kernel_hash import ROOT, kernel_hash

PATH = ROOT / "tests" / "gpu_record.json"
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(record: dict[str, Any], path: Path = PATH) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")


def faults(record: dict[str, Any], present_hash: str) -> list[str]:
    """What is wrong with a record for the kernels of that hash; empty when all is well."""
    found = []
    if record.get("hash") != present_hash:
        found.append(
            f"it is about kernels of hash {record.get('hash')}, those here have {present_hash}"
        )
    status = record.get("status")
    if status == "pending":
        if not record.get("reason"):
            found.append("it is pending without a reason")
    elif status != "passed":
        found.append(f"its status is {status!r}")
    else:
        if not record.get("passed"):
            found.append("no test passed")
        if record.get("failed") != 0:
            found.append(f"failed: {record.get('failed')} {record.get('failed_tests', '')}")
        sanitizer = record.get("sanitizer", {})
        found += [
            f"compute-sanitizer {tool}: {sanitizer.get(tool, 'not run')} errors"
            for tool in SANITIZER_TOOLS
            if sanitizer.get(tool) != 0
        ]
        if "cases" not in record:
            found.append("it has no counts of the hostile cases")
        found += [
            f"case {number}: {counts['failed']} failed"
            for number, counts in record.get("cases", {}).items()
            if counts["failed"]
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Says that no GPU could be had for these kernels.")
    parser.add_argument("status", choices=["pending"])
    parser.add_argument("reason", help="why there was no GPU")
    reason = parser.parse_args().reason.strip()
    if not reason:
        sys.exit('a reason is needed: make gpu-pending REASON="why there was no GPU"')
    write({"status": "pending", "reason": reason, "hash": kernel_hash(), "date": now()})
    print(f"wrote {PATH.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
