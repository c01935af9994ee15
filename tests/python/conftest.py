"""What all tests share: the GPU markers, the device to test on, and what is being tested."""

from __future__ import annotations

from pathlib import Path

import gnsilu
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Runs the test on the CPU and, where there is one, on a GPU."""
    return torch.device(request.param)
