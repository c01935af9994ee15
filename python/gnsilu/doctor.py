"""What works on this machine, what does not, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gnsilu import _C
from gnsilu.functional import group_norm_silu
from gnsilu.introspection import BuildInfo, build_info, explain
from gnsilu.library import REBUILD

WITH_NVCC = (
    'pip install "cuda-toolkit[nvcc,crt,cccl,cudart]=={cuda}.*" "nvidia-nvvm=={cuda}.*" '
    '"nvidia-cuda-crt=={cuda}.*"; then, in gnsilu\'s source folder: ' + REBUILD
)
OLDEST = (7, 5)  # compute capability


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    state: Literal["works", "limited", "broken"]
    what: str
    mend: str = ""
    """The command that mends it, where there is one."""


def examine() -> Iterator[Finding]:
    """All findings, in the order of a call's way: settings, libraries, GPUs, the tuner's files."""
    yield from _settings()
    build = build_info()
    yield Finding("works", f"The libraries are loaded: {build}.")
    yield _call(torch.device("cpu"), torch.bfloat16)
    yield from _kernels(build)
    yield from _gpus(build)
    yield _cache()


# ----------------------------------------------------------------------------------- settings


def _settings() -> Iterator[Finding]:
    route = os.environ.get("GNSILU_ROUTE", "auto")
    if route in _C.Route.__members__:
        what = f"GNSILU_ROUTE={route}: every call goes that way, or fails where it cannot."
        yield Finding("limited", what, "unset GNSILU_ROUTE")
    elif route not in ("auto", ""):
        known = ", ".join(["auto", *_C.Route.__members__])
        what = f"GNSILU_ROUTE={route!r} is no route ({known}): every call fails."
        yield Finding("broken", what, "unset GNSILU_ROUTE")
    if os.environ.get("GNSILU_TUNE") == "0":
        what = "GNSILU_TUNE=0: launch configurations are the default ones, never the tuned ones."
        yield Finding("limited", what, "unset GNSILU_TUNE")


# ---------------------------------------------------------------------------------- libraries


def _kernels(build: BuildInfo) -> Iterator[Finding]:
    if build.cuda:
        return
    cuda = torch.version.cuda
    if cuda is None:
        what = "This torch is one for the CPU, and so is gnsilu."
        mend = "install a torch with CUDA (https://pytorch.org), then: " + REBUILD
        yield Finding("limited", what, mend if shutil.which("nvidia-smi") else "")
        return
    what = "gnsilu was built without CUDA kernels: calls on a GPU take PyTorch's operators."
    found = int(cuda.split(".")[0]) >= 13  # PyPI has nvcc from there on
    toolkit = f"install CUDA toolkit {cuda}, set CUDA_HOME, then: {REBUILD}"
    yield Finding("limited", what, WITH_NVCC.format(cuda=cuda) if found else toolkit)


def _call(device: torch.device, dtype: torch.dtype) -> Finding:
    """A small call against PyTorch's operators in FP64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 33, 31, generator=generator).to(dtype)
    weight, bias = torch.randn(2, 8, generator=generator)
    wanted = torch.nn.functional.silu(
        torch.nn.functional.group_norm(x.double(), 4, weight.double(), bias.double())
    )
    try:
        x, weight, bias = x.to(device), weight.to(device), bias.to(device)
        y = group_norm_silu(x, 4, weight, bias)
        route = explain(x, 4, weight, bias).route
    except RuntimeError as error:
        return Finding("broken", f"A call on {device} fails: {str(error).splitlines()[0]}")
    if not torch.allclose(y.cpu().double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6):
        what = f"A call on {device} gives wrong values, by the route {route}. Please report it."
        return Finding("broken", what, "GNSILU_ROUTE=fallback avoids the kernels until then")
    return Finding("works", f"A call on {device} gives the FP64 result, by the route {route}.")


# --------------------------------------------------------------------------------------- GPUs


def _gpus(build: BuildInfo) -> Iterator[Finding]:
    if torch.version.cuda is None:
        return
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            yield Finding("limited", "No GPU is visible: every call takes PyTorch's operators.")
            return
        yield Finding("broken", f"torch sees no GPU: {_why_no_cuda()}", "nvidia-smi")
        return
    for index in range(torch.cuda.device_count()):
        try:
            yield from _gpu(torch.device("cuda", index), build)
        except RuntimeError as error:
            yield Finding("broken", f"cuda:{index} cannot be used: {str(error).splitlines()[0]}")


def _why_no_cuda() -> str:
    try:
        torch.empty(0, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "CUDA_VISIBLE_DEVICES is " + repr(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpu(device: torch.device, build: BuildInfo) -> Iterator[Finding]:
    name = f"{device} ({torch.cuda.get_device_name(device)})"
    capability = torch.cuda.get_device_capability(device)
    number = f"{capability[0]}{capability[1]}"
    rebuild = f"GNSILU_CUDA_ARCHITECTURES={number} {REBUILD}"
    if capability < OLDEST:
        needs = ".".join(map(str, OLDEST))
        what = f"{name} is older than compute capability {needs}: PyTorch's operators serve it."
        yield Finding("limited", what)
    elif build.cuda and not _has_machine_code(capability, build):
        what = f"{name}: no machine code for sm_{number} was built; the driver compiles it from PTX"
        yield Finding("limited", f"{what}, or PyTorch's operators serve it.", rebuild)
    for dtype in (torch.bfloat16, torch.float16):
        yield _call(device, dtype)


def _has_machine_code(capability: tuple[int, int], build: BuildInfo) -> bool:
    """Machine code runs on its own and on later minor versions of the capability."""
    major, minor = capability
    built = [name.removeprefix("sm_") for name in build.architectures if name.startswith("sm_")]
    return any(int(n[:-1]) == major and int(n[-1]) <= minor for n in built if n.isdigit())


# ------------------------------------------------------------------------------ tuner's files


def _cache() -> Finding:
    folder = _C.cache_directory()
    mend = "export GNSILU_CACHE_DIR=/a/folder/that/can/be/written"
    if folder is None:
        what = "No home folder and no GNSILU_CACHE_DIR: each process tunes anew."
        return Finding("limited", what, mend)
    if fault := cache_fault(folder):
        what = f"The tuner cannot write to {folder} ({fault}): each process tunes anew."
        return Finding("limited", what, mend)
    faults = [_C.read_tuner_file(path).fault for path in _C.tuner_files(folder)]
    if any(faults):
        what = f"A file of the tuner is ignored: {next(filter(None, faults))}."
        return Finding("limited", what, "python -m gnsilu cache --clear")
    return Finding("works", f"The tuner keeps its results in {folder}.")


def cache_fault(folder: Path) -> str | None:
    """Why the tuner cannot keep its files in that folder, which need not exist yet."""
    try:
        existing = _deepest_existing(folder)
        if not existing.is_dir():
            return f"{existing} is no folder"
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _deepest_existing(path: Path) -> Path:
    """It or the first of its parents that is there, be it a link that leads nowhere."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return _deepest_existing(path.parent)
    return path
