"""Fresh Python processes for the price of a fork.

Importing torch takes seconds. One process imports it, and nothing else: no gnsilu, no CUDA. It
forks for every program, whose process then ends as any other does. What torch reads from the
environment while it is imported cannot be set for a program; what CUDA and gnsilu read can.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIME_LIMIT = 90  # seconds, for one program: then SIGALRM ends it


def run_python(
    program: str, *, cwd: str = "/", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program, away from the sources; PYTHONPATH goes before what is on sys.path."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"program": program, "folder": folder, "cwd": cwd}
        request["environment"] = dict(os.environ) | environment
        status = _status_of(request)
        stdout, stderr = (
            Path(folder, name).read_text("utf-8", "replace") for name in ("stdout", "stderr")
        )
    if status == -signal.SIGALRM:
        stderr += f"\nended after {TIME_LIMIT} s\n"
    return subprocess.CompletedProcess(["python"], status, stdout, stderr)


def output_of(program: str, **environment: str) -> str:
    """What a program printed; fails where the program does."""
    done = run_python(program, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _status_of(request: dict[str, Any]) -> int:
    server = _server()
    assert server.stdin and server.stdout
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that forks has ended"
        return int(answer)
    except BaseException:
        # A test's time limit, perhaps: the next program must not get this one's answer.
        _server.cache_clear()
        server.kill()
        raise


@functools.cache
def _server() -> subprocess.Popen[str]:
    # Importing torch starts threads, which makes Python warn of every fork.
    command = [sys.executable, "-W", "ignore::DeprecationWarning:__main__", __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # Not left to end with its input: a process that a test forked may hold the pipe, too.
    atexit.register(server.kill)
    return server


def _become(request: dict[str, Any]) -> None:
    signal.alarm(TIME_LIMIT)
    names = {0: os.devnull, 1: f"{request['folder']}/stdout", 2: f"{request['folder']}/stderr"}
    for number, name in names.items():
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["-c"]


def _serve() -> str:
    """The program, in each process that is to run one."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
            return str(request["program"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


if __name__ == "__main__":
    del sys.path[0]  # this folder
    import torch  # noqa: F401

    exec(compile(_serve(), "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
