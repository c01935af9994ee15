"""Whose timings a tuner's file holds: any GPU's name, another GPU's, another driver's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gnsilu import _C
from hypothesis import given, settings
from hypothesis import strategies as st
from tuner_helpers import (
    GPU,
    heals,
    in_child,
    key,
    names_in,
    not_called,
    tune,
    tune_twice,
    winner,
)

NAMES = [
    "NVIDIA H200 MIG 1g.18gb",
    "a b",
    "a_b",
    "a/b",
    "a\\b",
    "A_B",
    "/",
    "..",
    "../../outside",
    "",
    " ",
    "\n\t",
    "%s%n",
    '"quoted", [1]',
    "Größe",
    "Gro\u0308ße",  # as above, to the eye
    "グラフィック",
    "🖥",
    "x" * 300,
    "x" * 299 + "y",
]
"""Of which no two may share a file, on a file system that minds case or one that does not."""


def test_case_49_any_name_has_a_file_of_its_own(tmp_path: Path) -> None:
    def tune_all() -> list[bool]:
        tuner = _C.Tuner(tmp_path, pytest.fail)
        return [tune(tuner, n, gpu=name) == winner(n) for n, name in enumerate(NAMES, start=1)]

    assert all(in_child(tune_all))
    paths = {_C.tuner_file_path(tmp_path, name) for name in NAMES}
    assert len({str(path).lower() for path in paths}) == len(NAMES)
    assert set(_C.tuner_files(tmp_path)) == paths
    assert names_in(tmp_path) == {path.name + end for path in paths for end in ("", ".lock")}
    # A process that is started later finds each, and tunes none.
    later = _C.Tuner(tmp_path, pytest.fail)
    for n, name in enumerate(NAMES, start=1):
        assert later.tune(key(n, gpu=name), not_called) == winner(n)
        assert _C.read_tuner_file(_C.tuner_file_path(tmp_path, name)).gpu == name


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=80), min_size=2, max_size=2, unique=True))
def test_case_49_a_name_stays_within_the_folder(names: list[str]) -> None:
    folder = Path("/some/folder")
    paths = [_C.tuner_file_path(folder, name) for name in names]
    assert paths[0] != paths[1]
    for path in paths:
        assert path.parent == folder
        assert path.name.isascii()
        assert path.name.isprintable()
        assert len(path.name) < 200  # with what an unfinished one has behind it below 255


def test_case_49_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    """What a driver gives as a name is bytes."""
    for n, name in enumerate((b"\xff\xfe", b"\xff", b"GPU \x80"), start=1):
        tuner = _C.Tuner(tmp_path, pytest.fail)
        assert tune(tuner, n, gpu=name) == winner(n)
        later = _C.Tuner(tmp_path, pytest.fail)
        assert later.tune(key(n, gpu=name), not_called) == winner(n)
    assert len(_C.tuner_files(tmp_path)) == 3


def test_case_49_the_file_of_another_gpu(tmp_path: Path) -> None:
    """Copied or renamed to our name: one warning, not used, replaced; the other one stays."""
    other = "NVIDIA Other"
    tune(_C.Tuner(tmp_path, pytest.fail), gpu=other)
    theirs, ours = (_C.tuner_file_path(tmp_path, gpu) for gpu in (other, GPU))
    before = theirs.read_bytes()
    shutil.copy(theirs, ours)
    (warning,) = heals(tmp_path, ours)
    assert warning.count(str(ours)) == 1
    assert "was made for another GPU" in warning
    assert theirs.read_bytes() == before
    assert _C.Tuner(tmp_path, pytest.fail).find(key(gpu=other)) == winner(8)


@pytest.mark.parametrize(
    "changes",
    [
        {"driver_version": 13010},
        {"driver_version": 12080},
        {"sm_count": 16},  # a slice of a GPU bears the whole one's name
        {"kernels": "older"},
        {"x_dtype": _C.DType.float16},
        {"y_dtype": _C.DType.float16},
    ],
    ids=str,
)
def test_case_49_the_same_gpu_otherwise(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Under another driver, for instance: tuned again, and both are kept."""
    assert tune_twice(tmp_path) == ([], True)
    tuner = _C.Tuner(tmp_path, pytest.fail)
    changed = key(**changes)
    assert tuner.find(changed) is None
    timed = []
    tuner.tune(changed, lambda config: timed.append(config) or 1.0)
    assert timed == _C.candidates(_C.Route.three_pass)
    later = _C.Tuner(tmp_path, pytest.fail)
    assert later.tune(changed, not_called) == timed[0]
    assert later.tune(key(), not_called) == winner(8)


def test_case_49_a_process_started_later_does_not_tune(tmp_path: Path) -> None:
    in_child(lambda: tune_twice(tmp_path))
    tuner = _C.Tuner(tmp_path, pytest.fail)
    assert tuner.tune(key(8), not_called) == winner(8)
    assert tuner.find(key(4)) == winner(4)
