"""Where the tuner's files lie, and machines that give them no place."""

from __future__ import annotations

import os
import pwd
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gnsilu import _C
from tuner_helpers import (
    GPU,
    as_ordinary_user,
    heals,
    in_child,
    key,
    names_in,
    tune,
    tune_twice,
    winner,
)

# --- No place to write -----------------------------------------------------------------------


def test_case_48_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails after that many bytes."""
    path = _C.tuner_file_path(tmp_path, GPU)
    assert tune_twice(tmp_path) == ([], True)
    before = path.read_bytes()
    limits = [0, 1, 100, 511, len(before) - 1, len(before)]

    def run() -> list[Any]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        found = []
        for limit in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            warnings: list[str] = []
            tuner = _C.Tuner(tmp_path, warnings.append)
            good = all(tune(tuner, n) == winner(n) == tuner.find(key(n)) for n in (8, 16, 32))
            found.append((good, len(warnings), str(path) in warnings[0]))
        return found

    assert in_child(run) == [[True, 1, True]] * len(limits)
    assert path.read_bytes() == before
    assert names_in(tmp_path) == {path.name, path.name + ".lock"}
    tune(_C.Tuner(tmp_path, pytest.fail), 16)  # there is room again
    assert _C.Tuner(tmp_path, pytest.fail).find(key(16)) == winner(16)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        Path(folder).chmod(0o755)


def test_case_48_a_read_only_home(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GNSILU_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(open_folder))
    open_folder.chmod(0o555)
    directory = _C.cache_directory()
    assert directory == open_folder / ".cache" / "gnsilu"
    warnings, good = as_ordinary_user(lambda: tune_twice(directory))
    assert good
    assert len(warnings) == 1
    assert str(directory) in warnings[0]
    assert list(open_folder.iterdir()) == []


def test_case_48_a_folder_that_may_be_read_but_not_written(open_folder: Path) -> None:
    path = _C.tuner_file_path(open_folder, GPU)
    assert tune_twice(open_folder) == ([], True)
    path.with_name(path.name + ".lock").unlink()
    path.chmod(0o444)
    open_folder.chmod(0o555)

    def run() -> tuple[Any, ...]:
        warnings: list[str] = []
        tuner = _C.Tuner(open_folder, warnings.append)
        found = tuner.find(key(8)) == winner(8)  # what is there serves
        return warnings[:], found, tune(tuner, 16) == winner(16), warnings

    early, found, tuned, warnings = as_ordinary_user(run)
    assert early == []
    assert found
    assert tuned
    assert len(warnings) == 1


def test_case_48_a_file_that_may_not_be_read(open_folder: Path) -> None:
    path = _C.tuner_file_path(open_folder, GPU)
    assert tune_twice(open_folder) == ([], True)
    path.chmod(0)
    warnings, good = as_ordinary_user(lambda: tune_twice(open_folder))
    assert good
    assert len(warnings) == 1
    assert str(path) in warnings[0]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/gnsilu", "/dev/null/x"])
def test_case_48_a_folder_that_cannot_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    warnings, good = tune_twice(tmp_path / place)
    assert good
    assert len(warnings) == 1
    assert str(tmp_path / place) in warnings[0]
    assert (tmp_path / "file").read_text() == "mine"


def test_case_48_a_folder_that_goes_away_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "gnsilu"
    tuner = _C.Tuner(directory, pytest.fail)
    for n in (8, 16):
        assert tune(tuner, n) == winner(n)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        directory.parent.rmdir()
    assert heals(directory, _C.tuner_file_path(directory, GPU)) == []


# --- Where the files lie ---------------------------------------------------------------------


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GNSILU_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_order_of_the_variables(bare_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare_environment.setenv("HOME", str(tmp_path))
    assert _C.cache_directory() == tmp_path / ".cache/gnsilu"
    bare_environment.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification: ignored
    assert _C.cache_directory() == tmp_path / ".cache/gnsilu"
    bare_environment.setenv("XDG_CACHE_HOME", "/xdg")
    assert _C.cache_directory() == Path("/xdg/gnsilu")
    bare_environment.setenv("GNSILU_CACHE_DIR", "")
    assert _C.cache_directory() == Path("/xdg/gnsilu")
    bare_environment.setenv("GNSILU_CACHE_DIR", "/elsewhere/Größe")
    assert _C.cache_directory() == Path("/elsewhere/Größe")


def test_case_48_without_home_the_user_database_tells(
    bare_environment: pytest.MonkeyPatch,
) -> None:
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    wanted = home / ".cache/gnsilu" if home.is_dir() else None
    assert _C.cache_directory() == wanted
    bare_environment.setenv("HOME", "")
    assert _C.cache_directory() == wanted


def test_case_48_a_home_that_is_missing_is_not_made(
    bare_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for home in (str(tmp_path / "missing"), "relative", "/dev/null"):
        bare_environment.setenv("HOME", home)
        assert _C.cache_directory() is None
    assert tune_twice(None) == ([], True)
    assert list(tmp_path.iterdir()) == []


def test_case_48_a_user_without_an_account(bare_environment: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a passwd entry")
    assert as_ordinary_user(lambda: str(_C.cache_directory())) == "None"
    assert as_ordinary_user(lambda: tune_twice(_C.cache_directory())) == [[], True]
