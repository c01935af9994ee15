"""The tuner's file among processes that are killed: real ones, by signal, at any point."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gnsilu import _C
from tuner_helpers import GPU, end, key, names_in, status_of, tune, winner

PROCESSES = 8
KEYS = 20
KILLS = 300
SECONDS = 20  # for the kills: fewer of them where the disk is slow


def entry(number: int, process: int, turn: int):
    return _C.TunerEntry(
        key=key(number, process),
        config=winner(number, process),
        microseconds=float(turn),
        made="2026-01-31T12:00:00Z",
    )


def say(pipe: int, number: int, turn: int) -> None:
    os.write(pipe, b"%d %d\n" % (number, turn))


@dataclass
class Writer:
    """A process that tunes twenty keys of its own, then writes them again and again."""

    path: Path
    process: int
    turn: int = 0
    child: int = 0
    pipe: int = -1
    reported: dict[int, int] = field(default_factory=dict)  # key's number: its last turn

    def start(self, order: list[int]) -> None:
        self.pipe, writing = os.pipe()
        self.turn += 1_000_000  # above all that an earlier process of this writer said
        self.child = os.fork()
        if self.child == 0:
            try:
                os.close(self.pipe)
                self.write_forever(order, writing)
            finally:
                os._exit(1)
        os.close(writing)

    def write_forever(self, order: list[int], pipe: int) -> None:
        tuner = _C.Tuner(self.path.parent, lambda message: os.write(pipe, message.encode()))
        for number in order:
            if tuner.find(key(number, self.process)) is None:
                tune(tuner, number, self.process)
                say(pipe, number, 0)
        while True:
            for number in order:
                self.turn += 1
                fault = _C.write_tuner_entry(self.path, entry(number, self.process, self.turn))
                assert fault == "", fault
                say(pipe, number, self.turn)
                time.sleep(0.003)  # or the one that holds the lock takes it again and again

    def kill(self) -> int:
        """How often the process had reported an entry as written."""
        child, self.child = self.child, 0
        assert os.WIFSIGNALED(end(child))  # it had not ended by itself
        with os.fdopen(self.pipe) as pipe:
            lines = pipe.readlines()
        for line in lines:
            number, turn = map(int, line.split())  # a warning is no pair of numbers: fails
            self.reported[number] = max(turn, self.reported.get(number, 0))
        return len(lines)


def stored_turns(path: Path) -> dict[tuple[int, int], float]:
    """Of each process's keys: the turn that is in the file. Fails where anything there is bad."""
    contents = _C.read_tuner_file(path, GPU)
    assert contents.fault == ""
    turns = {}
    for found in contents.entries:
        process, number = found.key.driver_version - 13000, found.key.channels_per_group
        assert found.config == winner(number, process)
        turns[process, number] = found.microseconds
    return turns


def assert_nothing_lost(path: Path, writer: Writer) -> None:
    turns = stored_turns(path)
    for number, turn in writer.reported.items():
        assert turns.get((writer.process, number), -1) >= turn


def assert_next_writer_is_well(path: Path) -> None:
    """No lock stays, and what the killed ones left is cleared away."""
    warnings: list[str] = []
    start = time.monotonic()
    tune(_C.Tuner(path.parent, warnings.append), KEYS + 1)
    assert time.monotonic() - start < 4  # a lock that stays costs 5 s
    assert warnings == []
    assert names_in(path.parent) == {path.name, path.name + ".lock"}


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[Writer]]:
    """Of one file; those that a failure leaves alive would write for ever."""
    path = _C.tuner_file_path(tmp_path, GPU)
    writers = [Writer(path, process) for process in range(PROCESSES)]
    yield writers
    for writer in writers:
        if writer.child:
            end(writer.child)


def kill_them(writers: list[Writer], path: Path) -> list[int]:
    """One by chance, many times over; how many entries each had reported."""
    chance = random.Random(46)

    def start(writer: Writer) -> None:
        writer.start(chance.sample(range(1, KEYS + 1), KEYS))

    for writer in writers:
        start(writer)
    reports: list[int] = []
    deadline = time.monotonic() + SECONDS
    pause = 0.003
    alive = list(writers)
    while alive:
        writer = chance.choice(alive)
        time.sleep(chance.uniform(0, 2 * pause))
        reports.append(writer.kill())
        # Flushing takes as long as the disk wants. Towards one in two that has reported nothing.
        pause = min(0.2, max(0.0005, pause * (1.1 if reports[-1] == 0 else 0.9)))
        if path.exists():
            json.loads(path.read_text())
        assert_nothing_lost(path, writer)
        if len(reports) + len(alive) <= KILLS and time.monotonic() < deadline:
            start(writer)
        else:
            alive.remove(writer)
    return reports


def test_case_46_killed_writers_lose_nothing_that_they_reported(
    writers: list[Writer], tmp_path: Path
) -> None:
    path = _C.tuner_file_path(tmp_path, GPU)
    reports = kill_them(writers, path)
    # It reached what it is about: writers killed before their first entry and amid many.
    assert 5 * PROCESSES < len(reports) <= KILLS
    assert 0 < reports.count(0) < 0.9 * len(reports)
    assert_next_writer_is_well(path)


def test_case_46_writers_that_live_lose_nothing_at_all(tmp_path: Path) -> None:
    path = _C.tuner_file_path(tmp_path, GPU)
    path.write_bytes(b"\x00 half a fi")
    children = []
    for process in range(PROCESSES):
        child = os.fork()
        if child == 0:
            try:
                tuner = _C.Tuner(tmp_path, lambda message: None)
                for number in range(1, 6):
                    tune(tuner, number, process)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        status_of(child)
    assert len(stored_turns(path)) == 5 * PROCESSES


# --- At every system call ---------------------------------------------------------------------

PTRACE_TRACEME, PTRACE_SYSCALL = 0, 24
NO_PTRACE = 77
NEEDS_PTRACE = "needs ptrace, to stop a process at its system calls"


def killed_after(calls: int, path: Path) -> tuple[bool, bool]:
    """A writer of one entry, killed after so many of its system calls.

    Whether it reported the entry, and whether it ended before.
    """
    ptrace = ctypes.CDLL(None).ptrace
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if ptrace(PTRACE_TRACEME, 0, None, None) != 0:
            os._exit(NO_PTRACE)
        os.kill(os.getpid(), signal.SIGSTOP)
        if not _C.write_tuner_entry(path, entry(1, 1, 1)):
            say(writing, 1, 1)
        os._exit(0)
    os.close(writing)
    status = status_of(child)
    for _ in range(2 * calls):  # a stop on the way in and one on the way out
        if not os.WIFSTOPPED(status):
            break
        if ptrace(PTRACE_SYSCALL, child, None, None) != 0:
            end(child)
            pytest.skip(NEEDS_PTRACE)
        status = status_of(child)
    ended = os.WIFEXITED(status)
    if ended and os.WEXITSTATUS(status) == NO_PTRACE:
        pytest.skip(NEEDS_PTRACE)
    if os.WIFSTOPPED(status):
        end(child)
    with os.fdopen(reading) as pipe:
        return pipe.read() == "1 1\n", ended


def test_case_46_killed_at_every_system_call_of_a_write(tmp_path: Path) -> None:
    """While it locks, reads, writes, flushes, renames, unlocks: the old file or the new one."""
    outcomes = set()
    for calls in range(1000):  # some 25 are made
        folder = tmp_path / str(calls)
        path = _C.tuner_file_path(folder, GPU)
        assert _C.write_tuner_entry(path, entry(1, 0, 1)) == ""
        reported, ended = killed_after(calls, path)
        turns = stored_turns(path)
        unfinished = len(names_in(folder)) - 2
        assert turns in ({(0, 1): 1.0}, {(0, 1): 1.0, (1, 1): 1.0})
        assert not reported or (1, 1) in turns
        outcomes.add((unfinished, (1, 1) in turns, reported))
        assert_next_writer_is_well(path)
        if ended:
            break
    # It reached: before the new file is made, before it is renamed, before and after it is said.
    assert outcomes == {(0, False, False), (1, False, False), (0, True, False), (0, True, True)}
