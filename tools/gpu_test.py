"""Runs every test on a GPU and writes what came out to tests/gpu_record.json.

The GoogleTest programs, pytest, and compute-sanitizer's four tools over
tests/python/sanitizer_shapes.py. The record is written whatever the outcome; the exit status is
0 only where nothing failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cases
import gpu_record
from cases import Counts
from kernel_hash import ROOT, kernel_hash

try:
    import gnsilu
    import torch
except ImportError as error:
    sys.exit(f"gpu-test: {sys.executable} cannot import what is to be tested: {error}")

SANITIZER_SCRIPT = ROOT / "tests" / "python" / "sanitizer_shapes.py"
# "ERROR SUMMARY: 0 errors", of racecheck "RACECHECK SUMMARY: 2 hazards displayed".
SANITIZER_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
SANITIZER_CASE = 44  # of docs/cases.md
# Seconds: the record is to be written whatever hangs.
CPP_LIMIT, PYTEST_LIMIT, SANITIZER_LIMIT = 120, 1200, 600


@dataclass
class Outcome:
    """Counts over all tests; names of the failed ones and reasons of the skipped ones."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    by_case: dict[int, Counts] = field(default_factory=dict)  # of the hostile cases

    def fail(self, what: str) -> None:
        print(f"FAILED {what}", flush=True)
        self.failed.append(what)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def add_junit(self, path: Path, suite: str) -> None:
        """Adds a report in JUnit's XML, which GoogleTest and pytest both write."""
        for case in ElementTree.parse(path).iter("testcase"):
            outcome = cases.outcome_of(case)
            if outcome == "failed":
                self.fail(f"{suite} {case.get('classname')}.{case.get('name')}")
            elif outcome == "skipped":
                self.skip(reason_of(case))
            else:
                self.passed += 1


def reason_of(skipped: ElementTree.Element) -> str:
    if skipped.get("result") == "suppressed":
        return "disabled in the source"
    found = skipped.find("skipped")
    return (found is not None and found.get("message")) or "no reason given"


def headline(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def run(command: list[str | Path], limit: float, **environment: str) -> int:
    """The exit status; beyond so many seconds the program is asked to end, then made to."""
    print("    " + " ".join(map(str, command)), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
    for means in (signal.SIGINT, signal.SIGKILL):  # pytest still writes its report at the first
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"    {means.name} after {limit} s", flush=True)
            process.send_signal(means)
            limit = 30
    return process.wait()


def library_folders() -> str:
    """Where libtorch and our libraries lie, for programs that were built on another machine."""
    ops = Path(gnsilu.library_path()).parent
    folders = [Path(torch.__file__).parent / "lib", ops, ops.parent]  # the kernels beside ops
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
            status = run(command, CPP_LIMIT, LD_LIBRARY_PATH=library_folders())
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
        command = [sys.executable, "-m", "pytest", "-ra", "--durations=30", "tests/python"]
        command += ["--ignore", "tests/python/test_gpu_record.py", f"--junitxml={report}"]
        environment = {"GNSILU_CPP_TESTS": str(cpp_tests.resolve())} if cpp_tests else {}
        status = run(command, PYTEST_LIMIT, **environment)
        failures = len(outcome.failed)
        if report.exists():
            outcome.add_junit(report, "pytest")
            outcome.by_case = cases.counts_in_junit(report)
        # 1: all were run and some failed.
        if status not in (0, 1) or (status == 1 and len(outcome.failed) == failures):
            outcome.fail(f"pytest: ended with status {status}")


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    homes += map(str, Path(torch.__file__).parent.parent.glob("nvidia/cu*"))
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes)])
    return shutil.which("compute-sanitizer", path=path)


def run_sanitizers(outcome: Outcome) -> dict[str, int | None]:
    """The errors that each tool of compute-sanitizer counted, None where it could not be run."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        outcome.fail("compute-sanitizer: not found in PATH or CUDA_HOME/bin")
        return dict.fromkeys(gpu_record.SANITIZER_TOOLS)
    # Without torch's caching allocator each tensor is an allocation of its own, so that a read
    # beyond its end is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    cores = (os.cpu_count() or 1) // len(gpu_record.SANITIZER_TOOLS)
    environment["OMP_NUM_THREADS"] = str(max(1, cores))
    with tempfile.TemporaryDirectory() as scratch:
        running = {}
        # All at once: each takes minutes, most of them on the CPU. Each with ports of its own, by
        # which a checker talks to what it checks.
        for tool, port in zip(gpu_record.SANITIZER_TOOLS, itertools.count(49152, 100)):
            command = [sanitizer, "--tool", tool, "--port", str(port)]
            log = Path(scratch, tool)
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*command, sys.executable, str(SANITIZER_SCRIPT)],
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            running[tool] = (process, log)
        end = time.monotonic() + SANITIZER_LIMIT
        found = {}
        for tool, (process, log) in running.items():
            try:
                status = process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            found[tool] = judge_sanitizer(tool, status, log.read_text("utf-8", "replace"), outcome)
        return found


def judge_sanitizer(tool: str, status: int, output: str, outcome: Outcome) -> int | None:
    headline(f"compute-sanitizer {tool}")
    print("\n".join(output.splitlines()[-20:]), flush=True)
    summaries = SANITIZER_SUMMARY.findall(output)
    errors = sum(map(int, summaries)) if summaries else None
    counts = outcome.by_case.setdefault(SANITIZER_CASE, Counts())
    if errors == 0 and status == 0:
        outcome.passed += 1
        counts.passed += 1
    else:
        outcome.fail(f"compute-sanitizer {tool}: {errors} errors, exit status {status}")
        counts.failed += 1
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
        "cases": cases.to_json(outcome.by_case),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gtest-dir", default="", help="folder of the C++ test programs")
    gtest_dir = parser.parse_args().gtest_dir
    folder = Path(gtest_dir) if gtest_dir else None
    # A shell has it ignored by what it puts into the background, and run() needs it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_subject()
    outcome = Outcome()
    run_cpp_tests(folder, outcome)
    run_pytest(folder, outcome)
    record = record_of(outcome, run_sanitizers(outcome))
    gpu_record.write(record)
    headline(f"wrote {gpu_record.PATH.relative_to(ROOT)}")
    for name in outcome.failed:
        print(f"FAILED {name}")
    print(f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    sys.exit(1 if outcome.failed else 0)


if __name__ == "__main__":
    main()
