"""Finding and loading the compiled libraries.

``lib/libgnsilu_kernels.so`` serves every torch; each ``lib/torchX.Y`` holds what serves one minor
version of it: the op library, linked to those kernels, and CMake's package. A wheel has one such
folder or several.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

LIBRARIES = Path(__file__).parent / "lib"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def library_path() -> str:
    """The path of the op library, for programs that load it without this package.

    ``torch.ops.load_library(gnsilu.library_path())`` registers the ops, so does a C++ program that
    links or opens it. It is the one for the running torch.
    """
    return str(_folder_for(torch.__version__) / "libgnsilu_ops.so")


def cmake_prefix_path() -> str:
    """Where CMake's ``find_package(gnsilu)`` finds the targets ``gnsilu::ops``, for the running
    torch, and ``gnsilu::kernels``: for ``CMAKE_PREFIX_PATH``."""
    return str(_folder_for(torch.__version__))


def built_for() -> str:
    """The version of torch that the op library for the running torch was built for."""
    facts = _folder_for(torch.__version__) / "built_for.txt"
    return facts.read_text("utf-8").strip()


def load_library() -> None:
    """Registers the ops, once.

    Raises:
        ImportError: the libraries are missing, were built for another torch, or cannot be loaded;
            the message says which command mends it.
    """
    running = torch.__version__
    library = _folder_for(running) / "libgnsilu_ops.so"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        importlib.import_module("gnsilu._C")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"gnsilu's libraries ({library.name} for torch {built_for()}; this is torch {running}) "
            f"cannot be loaded: {error}. In gnsilu's source folder run: {REBUILD}"
        ) from error


def _folder_for(version: str) -> Path:
    """Of what was built for this version of torch: ABIs are those of a minor version."""
    folder = LIBRARIES / f"torch{'.'.join(version.split('.')[:2])}"
    if folder.is_dir():
        return folder
    found = [path.name.removeprefix("torch") for path in LIBRARIES.glob("torch*.*")]
    if not found:
        raise ImportError(
            f"gnsilu at {LIBRARIES.parent} is not built. In its source folder run: {REBUILD}"
        )
    served = sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])
    raise ImportError(
        f"gnsilu was built for torch {', '.join(served)}; this is torch {version}. "
        f"Install one of those, or in gnsilu's source folder run: {REBUILD}"
    )
