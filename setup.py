"""Builds gnsilu's libraries with CMake; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def build_folder() -> Path:
    """Kept between builds, one for each interpreter and torch, so that a rebuild is incremental."""
    import torch

    torch_minor = ".".join(torch.__version__.split(".")[:2])
    default = f"build/{sys.implementation.cache_tag}-torch{torch_minor}"
    return ROOT / os.environ.get("GNSILU_BUILD_DIR", default)


def tool(name: str, module_folder: str) -> str:
    """The path of cmake or ninja: PyPI's, which a virtual environment need not have in PATH."""
    try:
        folder = getattr(__import__(name), module_folder)
    except (ImportError, AttributeError):
        folder = None
    path = (folder and shutil.which(name, path=folder)) or shutil.which(name)
    if path is None:
        sys.exit(f"gnsilu: {name} is missing; install it with: pip install {name}")
    return path


class CMakeBuild(build_ext):
    """build_ext that configures, builds and installs the CMake project into the package."""

    def run(self) -> None:
        if self.inplace or getattr(self, "editable_mode", False):
            sys.exit(
                "gnsilu: editable installs are not supported; after an edit run "
                "'pip install --no-build-isolation .' again, which rebuilds only what changed"
            )
        cmake, build = tool("cmake", "CMAKE_BIN_DIR"), build_folder()
        jobs = os.environ.get("GNSILU_BUILD_JOBS") or os.environ.get("MAX_JOBS")
        settings = {"GNSILU_BUILD_TESTS": "OFF", "GNSILU_CUDA": "", "GNSILU_CUDA_ARCHITECTURES": ""}
        self.call(
            [cmake, "-S", ROOT, "-B", build, "-G", "Ninja"],
            [f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'BIN_DIR')}"],
            [f"-DPython_EXECUTABLE={sys.executable}"],
            # Given even where empty: CMake keeps those of the build before otherwise.
            [f"-D{name}={os.environ.get(name, value)}" for name, value in settings.items()],
        )
        self.call([cmake, "--build", build, "--parallel", jobs or str(os.cpu_count() or 1)])
        self.call([cmake, "--install", build, "--prefix", Path(self.build_lib).resolve()])

    def call(self, *parts: list[str | Path]) -> None:
        command = [str(word) for part in parts for word in part]
        self.announce(" ".join(command), level=2)
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            sys.exit(f"gnsilu: '{' '.join(command)}' ended with status {status}")


# The extension has no sources of setuptools' own: it marks the wheel as one for this platform.
setup(ext_modules=[Extension("gnsilu._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
