"""The tuner's file among real processes, and on machines that give it no place."""

import json
import os
import pwd
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest
from gnsilu import _C

GPU = "NVIDIA Invented"
THREE_PASS = _C.Route.three_pass
CANDIDATES = _C.candidates(THREE_PASS)
NO_ACCOUNT = 54321  # a user id without a passwd entry

PROCESSES = 8
KEYS = 20


def key(channels_per_group=8, process=0):
    return _C.TunerKey(
        gpu=GPU,
        sm_count=132,
        driver_version=13000 + process,
        kernels=_C.kernel_version,
        route=THREE_PASS,
        channels_per_group=channels_per_group,
        x_dtype=_C.DType.bfloat16,
        y_dtype=_C.DType.bfloat16,
    )


def winner(channels_per_group, process=0):
    return CANDIDATES[(5 * channels_per_group + process) % len(CANDIDATES)]


def tune(tuner, channels_per_group=8, process=0):
    fastest = winner(channels_per_group, process)
    return tuner.tune(
        key(channels_per_group, process), lambda config: 1.0 if config == fastest else 2.0, 600
    )


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def in_child(function):
    """What function returns (JSON) in a forked process; fails where it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(function()).encode())
        except BaseException as error:
            os.write(writing, json.dumps({"raised": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert not (isinstance(answer, dict) and "raised" in answer), answer
    return answer


def as_ordinary_user(function):
    """Root may write anywhere: becomes a user without an account first."""

    def run():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NO_ACCOUNT)
            os.setuid(NO_ACCOUNT)
        return function()

    return in_child(run)


def tune_twice(directory):
    """Warnings, and whether both keys were tuned right and are remembered."""
    warnings = []
    tuner = _C.Tuner(directory, warnings.append)
    good = [tune(tuner, n) == winner(n) and tuner.find(key(n)) == winner(n) for n in (4, 8)]
    return warnings, all(good)


# --- Processes that are killed ---------------------------------------------------------------


def start_writer(directory, process, order):
    """Tunes twenty keys, saying the number of each once it is written. Returns pid and pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            tuner = _C.Tuner(directory, lambda message: os.write(writing, message.encode()))
            for number in order:
                tune(tuner, number, process)
                os.write(writing, b"%d\n" % number)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def test_killed_writers_lose_nothing_that_they_reported(tmp_path):
    chance = random.Random(46)
    deadline = time.monotonic() + 12
    killed_halfway = reported_in_all = rounds = 0
    while time.monotonic() < deadline or rounds < 2:
        rounds += 1
        directory = tmp_path / str(rounds)
        path = _C.tuner_file_path(directory, GPU)
        writers = []
        for process in range(PROCESSES):
            order = chance.sample(range(1, KEYS + 1), KEYS)
            writers.append(start_writer(directory, process, order))
        for process in chance.sample(range(PROCESSES), PROCESSES):
            time.sleep(chance.uniform(0, 0.08))
            os.kill(writers[process][0], signal.SIGKILL)
            if path.exists():
                json.loads(path.read_text())
        reported = set()
        for process, (child, reading) in enumerate(writers):
            with os.fdopen(reading) as pipe:
                numbers = [int(line) for line in pipe]  # a warning here is no number: fails
            os.waitpid(child, 0)
            reported |= {(process, number) for number in numbers}
            killed_halfway += 0 < len(numbers) < KEYS
        contents = _C.read_tuner_file(path, GPU)
        assert contents.fault == ""
        stored = {
            (entry.key.driver_version - 13000, entry.key.channels_per_group): entry.config
            for entry in contents.entries
        }
        assert reported <= stored.keys()
        for (process, number), config in stored.items():
            assert config == winner(number, process)
        reported_in_all += len(reported)

        # The next writer clears away what the killed ones left.
        warnings = []
        tune(_C.Tuner(directory, warnings.append), KEYS + 1)
        assert warnings == []
        assert names_in(directory) == {path.name, path.name + ".lock"}
    # The test reached what it is about, on a fast machine and on a slow one.
    assert killed_halfway >= 5
    assert reported_in_all >= rounds


def test_writers_that_live_lose_nothing_at_all(tmp_path):
    path = _C.tuner_file_path(tmp_path, GPU)
    path.write_bytes(b"\x00 half a fi")
    writers = [start_writer(tmp_path, process, range(1, 6)) for process in range(PROCESSES)]
    for child, reading in writers:
        with os.fdopen(reading) as pipe:
            pipe.read()
        os.waitpid(child, 0)
    contents = _C.read_tuner_file(path, GPU)
    assert contents.fault == ""
    assert len(contents.entries) == 5 * PROCESSES


def test_a_process_started_later_does_not_tune(tmp_path):
    in_child(lambda: tune_twice(tmp_path))
    tuner = _C.Tuner(tmp_path, pytest.fail)

    def not_called(config):
        raise AssertionError(f"{config} was timed again")

    assert tuner.tune(key(8), not_called) == winner(8)


# --- A bad file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\x00\x80",
        b'{"format": "gnsilu tuner", "version": 99, "gpu": "NVIDIA Invented", "entries": []}',
        b'{"format": "gnsilu tuner", "version": 1, "gpu": "NVIDIA Invented", "entries": [5]}',
        b'{"format": "gnsilu tuner", "version": 1, "gpu": "NVIDIA Other", "entries": []}',
        b" " * 5_000_000,
    ],
)
def test_a_bad_file_gives_one_warning_and_is_replaced(tmp_path, text):
    path = _C.tuner_file_path(tmp_path, GPU)
    path.write_bytes(text)
    warnings, good = tune_twice(tmp_path)
    assert good
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert {entry.key for entry in _C.read_tuner_file(path, GPU).entries} == {key(4), key(8)}
    assert tune_twice(tmp_path) == ([], True)


def test_a_folder_of_that_name(tmp_path):
    path = _C.tuner_file_path(tmp_path, GPU)
    path.mkdir()
    (path / "mine").touch()
    warnings, good = tune_twice(tmp_path)
    assert good
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    (path / "mine").unlink()  # an empty one gives way
    assert len(tune_twice(tmp_path)[0]) == 1
    assert tune_twice(tmp_path) == ([], True)


# --- No place to write -----------------------------------------------------------------------


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for it: writing fails after some bytes."""
    path = _C.tuner_file_path(tmp_path, GPU)
    assert tune_twice(tmp_path) == ([], True)
    before = path.read_bytes()

    def run():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        warnings = []
        tuner = _C.Tuner(tmp_path, warnings.append)
        return warnings, [tune(tuner, n) == winner(n) for n in (8, 16, 32)]

    warnings, good = in_child(run)
    assert all(good)
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert path.read_bytes() == before
    assert names_in(tmp_path) == {path.name, path.name + ".lock"}


@pytest.fixture
def open_folder():
    """A folder that other users can reach, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        Path(folder).chmod(0o755)


def test_a_read_only_home(open_folder, monkeypatch):
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


def test_a_folder_that_may_be_read_but_not_written(open_folder):
    path = _C.tuner_file_path(open_folder, GPU)
    assert tune_twice(open_folder) == ([], True)
    path.with_name(path.name + ".lock").unlink()
    path.chmod(0o444)
    open_folder.chmod(0o555)

    def run():
        warnings = []
        tuner = _C.Tuner(open_folder, warnings.append)
        found = tuner.find(key(8)) == winner(8)  # what is there serves
        return warnings[:], found, tune(tuner, 16) == winner(16), warnings

    early, found, tuned, warnings = as_ordinary_user(run)
    assert early == []
    assert found
    assert tuned
    assert len(warnings) == 1


def test_a_file_that_may_not_be_read(open_folder):
    path = _C.tuner_file_path(open_folder, GPU)
    assert tune_twice(open_folder) == ([], True)
    path.chmod(0)
    warnings, good = as_ordinary_user(lambda: tune_twice(open_folder))
    assert good
    assert len(warnings) == 1
    assert str(path) in warnings[0]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/gnsilu", "/dev/null/x"])
def test_a_folder_that_cannot_be(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    warnings, good = tune_twice(tmp_path / place)
    assert good
    assert len(warnings) == 1
    assert str(tmp_path / place) in warnings[0]
    assert (tmp_path / "file").read_text() == "mine"


# --- Where the files lie ---------------------------------------------------------------------


@pytest.fixture
def bare_environment(monkeypatch):
    for name in ("GNSILU_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_order_of_the_variables(bare_environment, tmp_path):
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


def test_without_home_the_user_database_tells(bare_environment):
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    wanted = home / ".cache/gnsilu" if home.is_dir() else None
    assert _C.cache_directory() == wanted
    bare_environment.setenv("HOME", "")
    assert _C.cache_directory() == wanted


def test_a_home_that_is_missing_is_not_made(bare_environment, tmp_path):
    for home in (str(tmp_path / "missing"), "relative", "/dev/null"):
        bare_environment.setenv("HOME", home)
        assert _C.cache_directory() is None
    assert tune_twice(None) == ([], True)
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_an_account(bare_environment):
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a passwd entry")

    assert as_ordinary_user(lambda: str(_C.cache_directory())) == "None"
    assert as_ordinary_user(lambda: tune_twice(_C.cache_directory())) == [[], True]
