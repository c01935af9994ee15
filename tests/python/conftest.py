"""What all tests share: the GPU markers, the device to test on, and what is being tested."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import case_table
import gnsilu
import gpu_record
import pytest
import torch


def missing_gpu(item: pytest.Item) -> str | None:
    """Why this machine cannot run the test; None where it can."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if item.get_closest_marker("two_gpus") and gpus < 2:
        return f"needs two CUDA GPUs: {gpus} here"
    if item.get_closest_marker("gpu") and gpus < 1:
        return "needs a CUDA GPU: torch.cuda.is_available() is False"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    case_table.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    case_table.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = missing_gpu(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> list[str]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    build = str(gnsilu.build_info()).replace("\n", ", ")
    return [
        f"gnsilu: {Path(gnsilu.__file__).parent}",
        f"build: {build}",
        f"torch: {torch.__version__}, GPUs: {', '.join(gpus) or 'none'}",
    ]


def pending_reason() -> str | None:
    """Why the present kernels have not been tested on a GPU; None where they have."""
    try:
        record = json.loads(gpu_record.PATH.read_text("utf-8"))
    except (OSError, ValueError):
        return None  # test_gpu_record.py fails
    return str(record.get("reason")) if record.get("status") == "pending" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Below pytest's own summary: what has not been tested here, and on no GPU."""
    yield
    reports = terminalreporter.getreports("skipped")
    reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    lines = [
        f"{count} skipped: {reason}"
        for reason, count in Counter(reasons).items()
        if reason.startswith("needs ")
    ]
    pending = pending_reason()
    if pending is not None:
        lines.append(f"the GPU record of these kernels is pending: {pending}")
    if lines:
        terminalreporter.section("not tested", yellow=True)
    for line in lines:
        terminalreporter.line(line, yellow=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test on the CPU and, where there is one, on a GPU."""
    return torch.device(request.param)


def _routes() -> list[object]:
    gpu = [
        pytest.param(("cuda", route), id=f"cuda-{route}", marks=pytest.mark.gpu)
        for route in ("auto", "two_pass", "three_pass", "fallback")
    ]
    return [pytest.param(("cpu", None), id="cpu"), *gpu]


@pytest.fixture(params=_routes())
def routed_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Runs the test on every route: the fallback on the CPU; on a GPU the one that is chosen and
    those that serve every shape."""
    device, route = request.param
    if route is not None:
        monkeypatch.setenv("GNSILU_ROUTE", route)
    return torch.device(device)
