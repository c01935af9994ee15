"""Prints the hash of the CUDA kernels' sources: csrc/cuda and include/gnsilu.

The hash says whether a GPU record (tests/gpu_record.json) or a tuner's entry is about these
kernels. Comments and white space do not count, so that they can be edited without a GPU at hand.

A program is compared token by token: the hash of `int a` differs from that of `inta`, while the
hash of `a+b` is that of `a + b`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc/cuda", "include/gnsilu")

# In this order: a comment marker within a string is part of the string.
TOKEN = re.compile(
    r"""
      (?P<raw>      (?:u8|[uUL])? R"(?P<delimiter>[^\s()\\]{0,16})\( .*? \)(?P=delimiter)" )
    | (?P<string>   (?:u8|[uUL])? "(?: \\. | [^"\\\n] )*" )
    | (?P<comment>  // (?: \\\r?\n | [^\n] )* | /\* .*? \*/ )
    | (?P<number>   \.? [0-9] (?: [eEpP][+-] | '[0-9a-zA-Z_] | [0-9a-zA-Z_.] )* )
    | (?P<char>     (?:u8|[uUL])? '(?: \\. | [^'\\\n] )*' )
    | (?P<word>     \w+ )
    | (?P<splice>   \\\r?\n )
    | (?P<newline>  \n )
    | (?P<space>    \s+? )
    | (?P<other>    . )
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens(source: str) -> Iterator[str]:
    """The tokens of a C++ source, without comments and white space.

    A preprocessor directive ends with its line, which is why the end of one is a token.
    """
    at_line_start, in_directive = True, False
    for match in TOKEN.finditer(source):
        kind, text = match.lastgroup, match.group()
        if kind == "newline":
            if in_directive:
                yield "\n"
            at_line_start, in_directive = True, False
        elif kind not in ("space", "splice", "comment"):
            in_directive = in_directive or (at_line_start and text == "#")
            at_line_start = False
            yield text


def hash_of(sources: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of (name, text) pairs, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, text in sources:
        digest.update(f"{name}\0".encode())
        for token in tokens(text):
            digest.update(f"{token}\0".encode())
        digest.update(b"\0")
    return digest.hexdigest()


def kernel_hash(root: Path = ROOT) -> str:
    """The hash of the kernel sources below `root`."""
    files = sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()
    )
    return hash_of((path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in files)


if __name__ == "__main__":
    print(kernel_hash())
