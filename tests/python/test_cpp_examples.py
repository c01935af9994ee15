"""examples/cpp: built against the installed package by find_package(gnsilu), and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import gnsilu
import pytest
import torch
from gnsilu import _C
from programs import KERNELS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the built programs."""
    cmake = pytest.importorskip("cmake", reason="no CMake from PyPI here")
    if not hasattr(cmake, "CMAKE_BIN_DIR"):  # this repository's folder of that name
        pytest.skip("no CMake from PyPI here")
    cmake = shutil.which("cmake", path=cmake.CMAKE_BIN_DIR)
    folder = tmp_path_factory.mktemp("examples")
    settings = {
        "CMAKE_PREFIX_PATH": gnsilu.cmake_prefix_path(),
        "TORCH_DIR": Path(torch.__file__).parent,
    }
    configure = [cmake, "-S", EXAMPLES, "-B", folder, *(f"-D{k}={v}" for k, v in settings.items())]
    for command in (configure, [cmake, "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def output_of(program: Path) -> str:
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_program_with_libtorch(programs):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert output_of(programs / "ops") == f"on {device}: as FP64 gives it\n"


def test_a_program_without_torch(programs):
    program = programs / "pointers"
    if not program.exists():
        pytest.skip("no CUDA toolkit that CMake finds, or gnsilu was built without CUDA")
    needed = subprocess.run(["readelf", "-d", program], capture_output=True, text=True).stdout
    assert "libgnsilu_kernels" in needed and "libtorch" not in needed and "libc10" not in needed
    output = output_of(program)
    if torch.cuda.is_available():
        assert output.startswith("resident: ") and "largest error 0.00" in output
    else:
        assert output == "no GPU; one of 132 multiprocessors would take resident\n"


@pytest.mark.parametrize("file", [KERNELS, _C.__file__], ids=["kernels", "module"])
def test_what_serves_every_torch_needs_none(file):
    needed = subprocess.run(
        ["readelf", "-d", file], capture_output=True, text=True, env=os.environ
    ).stdout
    assert "libstdc++" in needed and "libgnsilu_ops" not in needed
    assert not [line for line in needed.splitlines() if "libtorch" in line or "libc10" in line]
