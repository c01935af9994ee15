"""An invented GPU's launch tuner, with a fake timer, and the processes that use it."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gnsilu import _C

GPU = "NVIDIA Invented"
THREE_PASS = _C.Route.three_pass
CANDIDATES = _C.candidates(THREE_PASS)
NO_ACCOUNT = 54321  # a user id without a passwd entry
PATIENCE = 30  # seconds, with a child


def key(channels_per_group: int = 8, process: int = 0, gpu: str = GPU, **changes: Any):
    facts = {
        "gpu": gpu,
        "sm_count": 132,
        "driver_version": 13000 + process,
        "kernels": _C.kernel_version,
        "route": THREE_PASS,
        "channels_per_group": channels_per_group,
        "x_dtype": _C.DType.bfloat16,
        "y_dtype": _C.DType.bfloat16,
    }
    return _C.TunerKey(**{**facts, **changes})


def winner(channels_per_group: int, process: int = 0):
    """The configuration that the fake timer finds fastest; never the default."""
    return CANDIDATES[1 + (channels_per_group + process) % (len(CANDIDATES) - 1)]


def tune(tuner, channels_per_group: int = 8, process: int = 0, gpu: str = GPU):
    fastest = winner(channels_per_group, process)
    return tuner.tune(
        key(channels_per_group, process, gpu),
        lambda config: 1.0 if config == fastest else 2.0,
        600,
    )


def not_called(config):
    raise AssertionError(f"{config} was timed again")


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def tune_twice(directory: Path | None) -> tuple[list[str], bool]:
    """Warnings, and whether both keys were tuned right and are remembered."""
    warnings: list[str] = []
    tuner = _C.Tuner(directory, warnings.append)
    good = [tune(tuner, n) == winner(n) and tuner.find(key(n)) == winner(n) for n in (4, 8)]
    return warnings, all(good)


def heals(directory: Path, path: Path) -> list[str]:
    """The warnings of a process that meets what lies at path; afterwards all is well there."""
    warnings: list[str] = []
    tuner = _C.Tuner(directory, warnings.append)
    assert tuner.find(key()) is None  # the default configuration serves
    assert tune(tuner) == winner(8)
    assert tune(tuner, 4) == winner(4)
    contents = _C.read_tuner_file(path, GPU)
    assert contents.fault == ""
    assert {key(), key(4)} <= {entry.key for entry in contents.entries}
    later = _C.Tuner(directory, pytest.fail)
    assert later.tune(key(), not_called) == winner(8)
    return warnings


def status_of(child: int) -> int:
    """Waits until it ends, or stops where it is traced; fails where it does neither."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(1e-4)
    end(child)
    raise AssertionError(f"a child neither ended nor stopped within {PATIENCE} s")


def end(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def in_child(function: Callable[[], Any]) -> Any:
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
        if not select.select([pipe], [], [], PATIENCE)[0]:
            end(child)
            raise AssertionError(f"a child gave no answer within {PATIENCE} s")
        answer = json.loads(pipe.read())
    status_of(child)
    assert not (isinstance(answer, dict) and "raised" in answer), answer
    return answer


def as_ordinary_user(function: Callable[[], Any]) -> Any:
    """Root may write anywhere: becomes a user without an account first."""

    def run() -> Any:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NO_ACCOUNT)
            os.setuid(NO_ACCOUNT)
        return function()

    return in_child(run)
