"""Finding and loading the compiled libraries."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def library_path() -> str:
    """The path of the op library, for programs that load it without this package.

    ``torch.ops.load_library(gnsilu.library_path())`` registers the ops, so does a C++ program that
    links or opens it.
    """
    return str(Path(__file__).parent / "lib" / "libgnsilu_ops.so")


def cmake_prefix_path() -> str:
    """Where CMake's ``find_package(gnsilu)`` finds the targets ``gnsilu::ops`` and
    ``gnsilu::kernels``: for ``CMAKE_PREFIX_PATH``."""
    return str(Path(__file__).parent)


def load_library() -> None:
    """Registers the ops, once.

    Raises:
        ImportError: the libraries are missing, were built for another torch, or cannot be loaded;
            the message says which command mends it.
    """
    try:
        built_for = importlib.import_module("gnsilu._built_for").torch_version
    except ModuleNotFoundError:
        raise ImportError(
            f"gnsilu at {Path(__file__).parent} is not built. In its source folder run: {REBUILD}"
        ) from None
    running = torch.__version__
    if _minor(built_for) != _minor(running):
        raise ImportError(
            f"gnsilu was built for torch {built_for}, this is torch {running}. "
            f"In gnsilu's source folder run: {REBUILD}"
        )
    try:
        importlib.import_module("gnsilu._C")
    except ImportError as error:
        raise ImportError(
            f"gnsilu's libraries (built for torch {built_for}; this is torch {running}) cannot be "
            f"loaded: {error}. In gnsilu's source folder run: {REBUILD}"
        ) from error


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
