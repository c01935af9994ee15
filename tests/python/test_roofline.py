"""benchmarks/roofline.py without a GPU: what it makes of ncu's table, here written by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [
    "ID", "Kernel Name", "dram__bytes.sum", "gpu__time_duration.sum",
    "smsp__cycles_elapsed.avg.per_second", "smsp__inst_executed.sum",
]  # fmt: skip


def table(*rows: tuple[str, ...]) -> str:
    lines = [",".join(f'"{cell}"' for cell in row) for row in (NAMES, ("",) * 6, *rows)]
    return "\n".join(["==PROF== Connected to process 7 (python3)", *lines, ""])


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_kernels_of_one_call_are_added_up():
    import roofline

    printed = table(
        ("0", "span_moments", "2,000", "3000", "1000000000", "50"),
        ("1", "apply", "4000", "5000", "1,500,000,000", "70"),
    )
    count, clock = roofline.count_of(printed)
    assert count == roofline.Count(instructions=120, bytes=6000, seconds=pytest.approx(8e-6))
    assert count.intensity == pytest.approx(0.02)
    assert count.rate == pytest.approx(1.5e7)
    assert clock == pytest.approx(1.25e9)


def test_nothing_profiled_is_an_error():
    import roofline

    with pytest.raises(ValueError, match="ncu shows no kernel"):
        roofline.count_of("==ERROR== no permission")


def test_picture_and_line(tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    import roofline

    counts = {
        "copy_kernel": roofline.Count(2e7, 1e9, 250e-6),
        "ring": roofline.Count(2e8, 1.1e9, 340e-6),
    }
    environment = {
        "device": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11",
        "gnsilu": "0.1", "date": "2026-12-01",
    }  # fmt: skip
    figures = {
        "environment": environment, "shape": roofline.LARGE, "issue_per_second": 9e11,
        "counts": {name: asdict(count) for name, count in counts.items()},
    }  # fmt: skip
    roofline.save_roofline(figures, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    # 2^28 elements.
    assert "23.8 instructions an element,  4.10 bytes" in roofline.describe("ring", counts["ring"])


def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, str(FOLDER / "roofline.py"), "--output", str(tmp_path)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=hidden)
    assert done.returncode == 1 and "finds none" in done.stderr
    assert list(tmp_path.iterdir()) == []
