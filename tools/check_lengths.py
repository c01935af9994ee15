"""Fails where a source file is longer than 400 lines: such a file asks to be split by concept."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 400
FOLDERS = ("benchmarks", "cmake", "csrc", "include", "python", "tests", "tools")
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".py", ".pyi"}


def main() -> None:
    sources = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
    ]
    sources += [ROOT / name for name in ("CMakeLists.txt", "Makefile", "setup.py")]
    too_long = False
    for path in sources:
        lines = len(path.read_text("utf-8").splitlines())
        if lines > LIMIT:
            too_long = True
            print(f"{path.relative_to(ROOT)}: {lines} lines, the limit is {LIMIT}")
    if too_long:
        sys.exit(1)
    print(f"{len(sources)} source files, none longer than {LIMIT} lines")


if __name__ == "__main__":
    main()
