"""tools/kernel_hash.py: comments and white space do not count, everything else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_hash import hash_of, kernel_hash, tokens

SOURCE = """\
// Adds.
#define ADD(a, b) ((a) + \\
                   (b))
#include "x.h"
/* a block */ __global__ void add(float* y) {
  const char* url = "http://x"; char quote = '"';
  y[0] = ADD(1'000.f, 0x1p-3f);  // the sum
}
"""


def digest(text: str, name: str = "csrc/cuda/a.cu") -> str:
    return hash_of([(name, text)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// Adds.\n", ""),
        ("/* a block */", '/* another\n * block "with a quote */'),
        ("  // the sum", "// it's // \"the sum"),
        ("  y[0] =", "\n\n\ty[0]="),
        (" \\\n                   ", " "),
        ("(float* y) {", "(float *y)\n{"),
        ("\n", "\r\n"),
    ],
)
def test_comments_and_white_space_do_not_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y[0]", "y[1]"),
        ("1'000.f", "1'001.f"),
        ("http://x", "http://y"),  # behind // but within a string
        ("http://x", "http:// x"),  # white space within a string
        ("char quote", "charquote"),
        ("'\"'", "'/'"),
        ('#include "x.h"\n', '#include "x.h" '),  # the end of a directive is code
        ("(float* y)", "(float y)"),
    ],
)
def test_code_counts(old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) != digest(SOURCE)


def test_tokens_of_what_looks_like_a_comment() -> None:
    assert list(tokens('"//"+"/*"')) == ['"//"', "+", '"/*"']
    assert list(tokens(r'"\"//" x')) == [r'"\"//"', "x"]
    assert list(tokens('R"z( // )" )z" y')) == ['R"z( // )" )z"', "y"]
    assert list(tokens("a/b//c\nd")) == ["a", "/", "b", "d"]


def test_names_and_borders_of_files_count() -> None:
    assert digest("a") != digest("a", name="csrc/cuda/b.cu")
    assert hash_of([("a", "x"), ("b", "y")]) != hash_of([("a", ""), ("b", "x y")])


def test_which_files_are_read(tmp_path: Path) -> None:
    for name in ("csrc/cuda/a.cu", "include/gnsilu/a.h", "csrc/core/a.cpp"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("int a;", "utf-8")
    before = kernel_hash(tmp_path)
    (tmp_path / "csrc/core/a.cpp").write_text("int b;", "utf-8")
    assert kernel_hash(tmp_path) == before
    (tmp_path / "include/gnsilu/a.h").write_text("int b;", "utf-8")
    assert kernel_hash(tmp_path) != before


def test_the_hash_of_this_tree() -> None:
    assert len(kernel_hash()) == 64
    assert kernel_hash() == kernel_hash()
