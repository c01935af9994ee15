"""Sets up what `make` needs: a virtual environment with torch, the tools and gnsilu itself.

    python3 tools/setup_env.py --venv .venv --build build/dev --torch 2.11.0 test lint
    python3 tools/setup_env.py --tag

Needs only the standard library. What is missing on the machine is named together with the command
that brings it; as root on Debian or Ubuntu it is installed. Each step leaves a stamp in the
environment that says what it was done for, so a second run has nothing to do.
"""

import sys

# Before anything that an older Python does not know; so no `from __future__ import annotations`.
if sys.version_info < (3, 10):  # noqa: UP036, the one place that an older one reaches
    sys.exit(f"gnsilu needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
# What the installed package is made from; a change in one of these installs it again.
PACKAGE_SOURCES = (
    *("CMakeLists.txt", "LICENSE.txt", "README.md", "pyproject.toml", "setup.py"),
    *("cmake", "csrc", "include", "python", "tests/cpp", "tools/kernel_hash.py"),
)
BUILD_VARIABLES = (
    *("CC", "CXX", "CXXFLAGS", "CUDACXX", "CUDA_HOME"),
    *("GNSILU_CUDA", "GNSILU_CUDA_ARCHITECTURES"),
)


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command in the repository's root and ends the program where it fails."""
    words = [str(word) for word in command]
    print("    " + " ".join(words), flush=True)
    status = subprocess.run(words, cwd=ROOT, env=os.environ | environment, check=False).returncode
    if status != 0:
        sys.exit(f"set-up stopped: '{' '.join(words)}' ended with status {status}")


def lock() -> TextIO:
    """Waits for the set-up of another make in this checkout; the lock is held until closed."""
    path = ROOT / "build" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waiting for another make that is setting up")
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


# --- The machine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Something that the machine, not pip, has to bring."""

    what: str
    apt_package: str
    required: bool
    present: bool


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def compiles(source: str, standard: int = 17) -> bool:
    """Whether the C++ compiler takes this source."""
    command = compiler()
    if command is None:
        return False
    arguments = [*command.split(), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(arguments, input=source, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def venv_works() -> bool:
    """Debian's python3 has the venv module but not always ensurepip, which venv needs."""
    done = subprocess.run(
        [sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False
    )
    return done.returncode == 0


def cxx_standard(torch: str) -> int:
    """The C++ that the headers of this torch are written in; cmake/torch.cmake says the same."""
    major, minor = (int(part) for part in torch.split(".")[:2])
    return 20 if (major, minor) >= (2, 14) else 17


def takes_standard(standard: int) -> bool:
    if standard == 17:
        return compiles("#include <optional>\nint main() { return std::optional<int>(0).value(); }")
    source = "#include <bit>\n#include <compare>\nint main() { return std::bit_width(0u); }"
    return compiles(f"{source}\nstd::strong_ordering order = 1 <=> 2;", standard)


def needs(standard: int) -> list[Need]:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return [
        Need(f"a C++{standard} compiler", "g++", True, takes_standard(standard)),
        Need("Python's venv module", f"{python}-venv", True, venv_works()),
        Need("Python's header files", f"{python}-dev", True, header.exists()),
        Need("GoogleTest", "libgtest-dev", False, compiles("#include <gtest/gtest.h>")),
        Need(
            "nlohmann-json", "nlohmann-json3-dev", False, compiles("#include <nlohmann/json.hpp>")
        ),
    ]


def check_machine(standard: int) -> None:
    missing = [need for need in needs(standard) if not need.present]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        say("installing " + ", ".join(need.what for need in missing))
        apt_get = ("apt-get", "-o", "DPkg::Lock::Timeout=120")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(*apt_get, "update", "-q", **quiet)
        packages = [need.apt_package for need in missing]
        # The optional ones may be unknown to an old release: CMake fetches those.
        if subprocess.run(["apt-cache", "show", *packages], capture_output=True).returncode != 0:
            packages = [need.apt_package for need in missing if need.required]
        if packages:
            run(*apt_get, "install", "-y", "-q", "--no-install-recommends", *packages, **quiet)
        missing = [need for need in needs(standard) if not need.present]
    for need in missing:
        effect = "missing" if need.required else "missing, CMake will fetch it"
        brought = f"sudo apt-get install {need.apt_package}"
        print(f"    {need.what}: {effect}; on Debian or Ubuntu: {brought}", flush=True)
    if any(need.required for need in missing):
        sys.exit("set-up stopped: install what is missing above and run make again")


# --- The virtual environment -----------------------------------------------------------------


def interpreter_tag() -> str:
    """Names what environments and builds of one interpreter share: "cpython-312"."""
    return f"{sys.implementation.cache_tag}{sys.abiflags}"


class Environment:
    """A virtual environment whose steps are remembered in one JSON file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamps = folder / "gnsilu-setup.json"

    def done_for(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.stamps.read_text("utf-8")))
        except (OSError, ValueError):
            return {}

    def is_done(self, step: str, what: str) -> bool:
        return self.done_for().get(step) == what

    def mark_done(self, step: str, what: str) -> None:
        self.stamps.write_text(json.dumps(self.done_for() | {step: what}, indent=1), "utf-8")

    def pip(self, *arguments: str, **environment: str) -> None:
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        run(self.python, "-m", "pip", *arguments, **(quiet | environment))

    def ask(self, program: str) -> str:
        done = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"set-up stopped: {self.python} failed:\n{done.stderr}")
        return done.stdout.strip()

    def works(self) -> bool:
        """Whether it runs, has pip and is of this interpreter's version, wherever that lies."""
        program = "import sys, pip; print(sys.implementation.cache_tag + sys.abiflags)"
        try:
            done = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        except OSError:
            return False
        return done.returncode == 0 and done.stdout.strip() == interpreter_tag()

    def create(self) -> None:
        if self.works():
            return
        say(f"virtual environment {self.folder} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", "--clear", self.folder)

    def install(self, step: str, requirements: list[str], why: str, quiet: bool = True) -> None:
        what = " ".join(requirements)
        if not requirements or self.is_done(step, what):
            return
        say(why)
        # Quiet also hides the progress bars, which large downloads need.
        self.pip("install", *(["--quiet"] if quiet else []), *requirements)
        self.mark_done(step, what)


def project_requirements(environment: Environment) -> dict[str, list[str]]:
    """The lists in pyproject.toml, under "build" and the names of the extras."""
    # Python 3.10 has no TOML reader of its own, pip has.
    text = environment.ask(
        "import json\n"
        "try:\n    import tomllib\n"
        "except ImportError:\n    from pip._vendor import tomli as tomllib\n"
        f"data = tomllib.loads(open({str(ROOT / 'pyproject.toml')!r}, encoding='utf-8').read())\n"
        "project = data['project']\n"
        "print(json.dumps({'build': data['build-system']['requires'],\n"
        "    **project['optional-dependencies']}))"
    )
    return dict(json.loads(text))


def visible_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def nvcc_wheels(cuda: str) -> list[str]:
    """NVIDIA's compiler on PyPI for a CUDA version such as "13.0".

    nvvm and crt are pinned along: left free, a newer nvvm emits PTX that this ptxas refuses.
    """
    return [
        f"cuda-toolkit[nvcc,crt,cccl,cudart]=={cuda}.*",
        f"nvidia-nvvm=={cuda}.*",
        f"nvidia-cuda-crt=={cuda}.*",
    ]


def nvcc_major() -> str:
    """The major version of the machine's nvcc, empty without one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if not nvcc:
        return ""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("release ")[2].partition(".")[0]


def install_nvcc(environment: Environment) -> None:
    """Installs nvcc where it is wanted (a GPU is here, or GNSILU_CUDA=1) and missing."""
    cuda = environment.ask("import torch; print(torch.version.cuda or '')")
    if (
        not cuda
        or os.environ.get("GNSILU_CUDA") in ("0", "OFF")
        or nvcc_major() == cuda.split(".")[0]
    ):
        return
    if not visible_gpu() and os.environ.get("GNSILU_CUDA") not in ("1", "ON"):
        say(
            f"CPU-only build: no nvcc for CUDA {cuda} and no GPU on this machine "
            "(GNSILU_CUDA=1 installs nvcc from PyPI and builds the CUDA kernels)"
        )
    elif int(cuda.split(".")[0]) < 13:
        sys.exit(
            f"set-up stopped: this torch needs nvcc {cuda}, and PyPI has nvcc from CUDA 13 on. "
            f"Install CUDA toolkit {cuda} and set CUDA_HOME, or set GNSILU_CUDA=0 to do without"
        )
    else:
        why = f"nvcc for CUDA {cuda}, from PyPI"
        environment.install("nvcc", nvcc_wheels(cuda), why, quiet=False)


# --- gnsilu itself ---------------------------------------------------------------------------


def is_generated(path: Path) -> bool:
    """What Python and setuptools write among the sources."""
    return any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)


def source_hash() -> str:
    digest = hashlib.sha256()
    for name in PACKAGE_SOURCES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and not is_generated(path.relative_to(ROOT)):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    for name, value in sorted(os.environ.items()):
        if name in BUILD_VARIABLES:
            digest.update(f"{name}={value}\0".encode())
    return digest.hexdigest()


def install_gnsilu(environment: Environment, build: str) -> None:
    what = f"{build} {source_hash()}"
    if environment.is_done("gnsilu", what) and (ROOT / build / "CTestTestfile.cmake").exists():
        return
    say("building and installing gnsilu, with its C++ tests")
    environment.pip(
        *("install", "--verbose", "--no-build-isolation", "."),
        "--config-settings=--global-option=--quiet",  # CMake's lines without setuptools' own
        GNSILU_BUILD_TESTS="ON",
        GNSILU_BUILD_DIR=build,
    )
    environment.mark_done("gnsilu", what)


def set_up(options: argparse.Namespace) -> None:
    environment = Environment(options.venv.absolute())
    if not environment.done_for():
        say("checking the machine")
        check_machine(cxx_standard(options.torch))
    environment.create()
    environment.install("pip", ["pip>=24"], "pip")
    torch = [f"torch=={options.torch}"]
    why = f"torch {options.torch} (some GB, this takes a while)"
    environment.install("torch", torch, why, quiet=False)
    lists = project_requirements(environment)
    environment.install("tools", lists["build"] + torch, "build tools")
    for extra in options.extras:
        environment.install(extra, lists[extra] + torch, f"what '{extra}' needs")
    if options.extras != ["lint"]:
        install_nvcc(environment)
        install_gnsilu(environment, options.build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", action="store_true", help="print the interpreter's tag, no more")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="the environment's folder")
    parser.add_argument("--build", default="build/dev", help="CMake's build folder")
    parser.add_argument("--torch", default="2.11.0", help="version of torch, such as 2.11.0")
    parser.add_argument("extras", nargs="*", help="test, demo, lint: extras of pyproject.toml")
    options = parser.parse_args()
    if options.tag:
        print(interpreter_tag())
        return
    if not re.match(r"\d+\.\d+", options.torch):
        parser.error(f"--torch: {options.torch!r} is not a version such as 2.11.0")
    with lock():
        set_up(options)


if __name__ == "__main__":
    main()
