"""Runs every test on a GPU and writes what came out to tests/gpu_record.json.

The GoogleTest programs, pytest, and compute-sanitizer's memcheck and racecheck over
tests/python/sanitizer_shapes.py. The record is written whatever the outcome; the exit status is
0 only where nothing failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_record
from kernel_hash import ROOT, kernel_hash

try:
    import gnsilu
    import torch
except ImportError as error:
    sys.exit(f"gpu-test: {sys.executable} cannot import what is to be tested: {error}")

SANITIZER_SCRIPT = ROOT / "tests" / "python" / "sanitizer_shapes.py"
# "ERROR SUMMARY: 0 errors" of memcheck, "RACECHECK SUMMARY: 2 hazards displayed" of racecheck.
SANITIZER_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


@dataclass
class Outcome:
    """Counts over all tests; names of the failed ones and reasons of the skipped ones."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        print(f"FAILED {what}", flush=True)
        self.failed.append(what)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def add_junit(self, path: Path, suite: str) -> None:
        """Adds a report in JUnit's XML, which GoogleTest and pytest both write."""
        for case in ElementTree.parse(path).iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.fail(f"{suite} {case.get('classname')}.{case.get('name')}")
            elif skipped is not None:
                self.skip(skipped.get("message") or "no reason given")
            elif case.get("result") == "suppressed":
                self.skip("disabled in the source")
            else:
                self.passed += 1


def headline(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def run(command: list[str | Path], **environment: str) -> int:
    print("    " + " ".join(map(str, command)), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def library_folders() -> str:
    """Where libtorch and the op library lie, for programs that were built on another machine."""
    folders = [Path(torch.__file__).parent / "lib", Path(gnsilu.library_path()).parent]
    before = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([*map(str, folders), *([before] if before else [])])


def run_cpp_tests(folder: Path | None, outcome: Outcome) -> None:
    programs = sorted(folder.glob("*_test")) if folder else []
    programs += [folder / "op_program"] if folder and (folder / "op_program").exists() else []
    if not programs:
        outcome.skip(f"C++ tests: no programs in {folder}" if folder else "C++ tests: none given")
    for program in programs:
        headline(program.name)
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            command = [program.resolve()]
            if program.name.endswith("_test"):
                command.append(f"--gtest_output=xml:{report}")
            status = run(command, LD_LIBRARY_PATH=library_folders())
            failures = len(outcome.failed)
            if report.exists():
                outcome.add_junit(report, program.name)
            elif status == 0:
                outcome.passed += 1
            if status != 0 and len(outcome.failed) == failures:
                outcome.fail(f"{program.name}: ended with status {status}")


def run_pytest(cpp_tests: Path | None, outcome: Outcome) -> None:
    headline("pytest")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # The record is what this run makes: its own test comes after.
        command = [sys.executable, "-m", "pytest", "-ra", "tests/python"]
        command += ["--ignore", "tests/python/test_gpu_record.py", f"--junitxml={report}"]
        environment = {"GNSILU_CPP_TESTS": str(cpp_tests.resolve())} if cpp_tests else {}
        status = run(command, **environment)
        failures = len(outcome.failed)
        if report.exists():
            outcome.add_junit(report, "pytest")
        if status != 0 and len(outcome.failed) == failures:
            outcome.fail(f"pytest: ended with status {status}")


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    homes += map(str, Path(torch.__file__).parent.parent.glob("nvidia/cu*"))
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)])
    return shutil.which("compute-sanitizer", path=path)


def run_sanitizer(tool: str, outcome: Outcome) -> int | None:
    """The errors that compute-sanitizer counted, None where it could not be run."""
    headline(f"compute-sanitizer {tool}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        outcome.fail(f"compute-sanitizer {tool}: not found in PATH or CUDA_HOME/bin")
        return None
    # Without torch's caching allocator each tensor is an allocation of its own, so that a read
    # beyond its end is seen.
    command = [sanitizer, "--tool", tool, sys.executable, str(SANITIZER_SCRIPT)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    print("\n".join(output.splitlines()[-20:]), flush=True)
    summaries = SANITIZER_SUMMARY.findall(output)
    errors = sum(map(int, summaries)) if summaries else None
    if errors == 0 and done.returncode == 0:
        outcome.passed += 1
    else:
        outcome.fail(f"compute-sanitizer {tool}: {errors} errors, exit status {done.returncode}")
    return errors


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def check_subject() -> None:
    """Ends the program where there is nothing to test here, or something else would be tested."""
    if not torch.cuda.is_available():
        sys.exit("gpu-test needs a CUDA GPU: torch.cuda.is_available() is False")
    if not gnsilu.build_info().cuda:
        sys.exit("gpu-test: the installed gnsilu was built without CUDA; see CONTRIBUTING.md")
    if not kernel_hash().startswith(gnsilu._C.kernel_version):
        folder = Path(gnsilu.__file__).parent
        sys.exit(f"gpu-test: {folder} was built from other kernel sources: install gnsilu again")


def record_of(outcome: Outcome, sanitizer: dict[str, int | None]) -> dict[str, Any]:
    return {
        "status": "failed" if outcome.failed else "passed",
        "hash": kernel_hash(),
        "date": gpu_record.now(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "build": str(gnsilu.build_info()),
        "passed": outcome.passed,
        "failed": len(outcome.failed),
        "failed_tests": outcome.failed,
        "skipped": sum(outcome.skipped.values()),
        "skip_reasons": outcome.skipped,
        "sanitizer": sanitizer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gtest-dir", default="", help="folder of the C++ test programs")
    gtest_dir = parser.parse_args().gtest_dir
    folder = Path(gtest_dir) if gtest_dir else None
    check_subject()
    outcome = Outcome()
    run_cpp_tests(folder, outcome)
    run_pytest(folder, outcome)
    sanitizer = {tool: run_sanitizer(tool, outcome) for tool in ("memcheck", "racecheck")}
    record = record_of(outcome, sanitizer)
    gpu_record.write(record)
    headline(f"wrote {gpu_record.PATH.relative_to(ROOT)}")
    for name in outcome.failed:
        print(f"FAILED {name}")
    print(f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
