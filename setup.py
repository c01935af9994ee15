"""Builds gnsilu's libraries with CMake; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
if int(setuptools.__version__.split(".")[0]) < 77:
    # It would complain of pyproject.toml instead.
    sys.exit(
        f"gnsilu: setuptools {setuptools.__version__} is too old; run: "
        'pip install "setuptools>=77" "pybind11>=2.12" "cmake>=3.24" ninja'
    )


def torch_minor() -> str | None:
    """Of the torch that is built for, such as "2.11"; None where none is installed."""
    try:
        return ".".join(importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None  # CMake finds it nevertheless, or says what to do


def build_folder() -> Path:
    """Kept between builds, one for each interpreter and torch, so that a rebuild is incremental."""
    torch = torch_minor() or "-unknown"
    default = f"build/{sys.implementation.cache_tag}{sys.abiflags}-torch{torch}"
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


class Build(build):
    """build in the build folder, so that what was built for another torch gets into no wheel."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = str(build_folder() / "package")

    def run(self) -> None:
        # What an earlier build left there would get into the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """build_ext that configures, builds and installs the CMake project into the package."""

    def run(self) -> None:
        if self.inplace or getattr(self, "editable_mode", False):
            sys.exit(
                "gnsilu: editable installs are not supported; after an edit run "
                "'pip install --no-build-isolation .' again, which rebuilds only what changed"
            )
        cmake, folder = tool("cmake", "CMAKE_BIN_DIR"), build_folder()
        jobs = os.environ.get("GNSILU_BUILD_JOBS") or os.environ.get("MAX_JOBS")
        settings = {"GNSILU_BUILD_TESTS": "OFF", "GNSILU_CUDA": "", "GNSILU_CUDA_ARCHITECTURES": ""}
        self.call(
            [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja"],
            [f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'BIN_DIR')}"],
            [f"-DPython_EXECUTABLE={sys.executable}"],
            # Given even where empty: CMake keeps those of the build before otherwise.
            [f"-D{name}={os.environ.get(name, value)}" for name, value in settings.items()],
        )
        self.call([cmake, "--build", folder, "--parallel", jobs or str(os.cpu_count() or 1)])
        self.call([cmake, "--install", folder, "--prefix", Path(self.build_lib).resolve()])

    def call(self, *parts: list[str | Path]) -> None:
        command = [str(word) for part in parts for word in part]
        self.announce(" ".join(command), level=2)
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            sys.exit(f"gnsilu: '{' '.join(command)}' ended with status {status}")


# What is built serves one minor version of torch: name and requirements of the wheel say which.
# Sources serve all.
built_for = None if "sdist" in sys.argv else torch_minor()

# The extension has no sources of setuptools' own: it marks the wheel as one for this platform.
setuptools.setup(
    ext_modules=[setuptools.Extension("gnsilu._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
    install_requires=[f"torch=={built_for}.*" if built_for else "torch>=2.8", "rich"],
    options={"egg_info": {"tag_build": f"+torch{built_for}" if built_for else ""}},
)
