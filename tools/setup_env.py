"""Sets up what `make` needs: a virtual environment with torch, the tools and gnsilu itself.

    python3 tools/setup_env.py --venv .venv --build build/dev --torch 2.11.0 test lint

Needs only the standard library. What is missing on the machine is named together with the command
that brings it; as root on Debian or Ubuntu it is installed. Each step leaves a stamp in the
environment that says what it was done for, so a second run has nothing to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the installed package is made from; a change in one of these installs it again.
PACKAGE_SOURCES = (
    *("CMakeLists.txt", "LICENSE.txt", "README.md", "pyproject.toml", "setup.py"),
    *("cmake", "csrc", "include", "python", "tests/cpp", "tools/kernel_hash.py"),
)
BUILD_VARIABLES = ("CC", "CXX", "CXXFLAGS", "CUDACXX", "CUDA_HOME")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command in the repository's root and ends the program where it fails."""
    words = [str(word) for word in command]
    print("    " + " ".join(words), flush=True)
    status = subprocess.run(words, cwd=ROOT, env=os.environ | environment, check=False).returncode
    if status != 0:
        sys.exit(f"set-up stopped: '{' '.join(words)}' ended with status {status}")


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


def compiles(source: str) -> bool:
    """Whether the C++ compiler takes this C++17 source."""
    command = compiler()
    if command is None:
        return False
    arguments = [*command.split(), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
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


def needs() -> list[Need]:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    cxx17 = compiles("#include <optional>\nint main() { return std::optional<int>(0).value(); }")
    return [
        Need("a C++17 compiler", "g++", True, cxx17),
        Need("Python's venv module", f"{python}-venv", True, venv_works()),
        Need("Python's header files", f"{python}-dev", True, header.exists()),
        Need("GoogleTest", "libgtest-dev", False, compiles("#include <gtest/gtest.h>")),
        Need(
            "nlohmann-json", "nlohmann-json3-dev", False, compiles("#include <nlohmann/json.hpp>")
        ),
    ]


def check_machine() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036, the one place that an older one reaches
        sys.exit(f"gnsilu needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}")
    missing = [need for need in needs() if not need.present]
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
        missing = [need for need in needs() if not need.present]
    for need in missing:
        effect = "missing" if need.required else "missing, CMake will fetch it"
        brought = f"sudo apt-get install {need.apt_package}"
        print(f"    {need.what}: {effect}; on Debian or Ubuntu: {brought}", flush=True)
    if any(need.required for need in missing):
        sys.exit("set-up stopped: install what is missing above and run make again")


# --- The virtual environment -----------------------------------------------------------------


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

    def create(self) -> None:
        interpreter = f"{Path(sys.executable).resolve()} {sys.version}"
        if self.is_done("interpreter", interpreter):
            return
        say(f"virtual environment {self.folder} with Python {sys.version.split()[0]}")
        run(sys.executable, "-m", "venv", "--clear", self.folder)
        self.mark_done("interpreter", interpreter)

    def install(self, step: str, requirements: list[str], why: str) -> None:
        what = " ".join(requirements)
        if not requirements or self.is_done(step, what):
            return
        say(why)
        self.pip("install", *requirements)
        self.mark_done(step, what)


def project_requirements(environment: Environment) -> dict[str, list[str]]:
    """The lists in pyproject.toml, under "build", "run" and the names of the extras."""
    # Python 3.10 has no TOML reader of its own, pip has.
    text = environment.ask(
        "import json\n"
        "try:\n    import tomllib\n"
        "except ImportError:\n    from pip._vendor import tomli as tomllib\n"
        f"data = tomllib.loads(open({str(ROOT / 'pyproject.toml')!r}, encoding='utf-8').read())\n"
        "project = data['project']\n"
        "print(json.dumps({'build': data['build-system']['requires'],\n"
        "    'run': project['dependencies'], **project['optional-dependencies']}))"
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
        environment.install("nvcc", nvcc_wheels(cuda), f"nvcc for CUDA {cuda}, from PyPI")


# --- gnsilu itself ---------------------------------------------------------------------------


def source_hash() -> str:
    digest = hashlib.sha256()
    for name in PACKAGE_SOURCES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    for name, value in sorted(os.environ.items()):
        if name.startswith("GNSILU_") or name in BUILD_VARIABLES:
            digest.update(f"{name}={value}\0".encode())
    return digest.hexdigest()


def install_gnsilu(environment: Environment, build: str) -> None:
    what = f"{build} {source_hash()}"
    if environment.is_done("gnsilu", what) and (ROOT / build / "CTestTestfile.cmake").exists():
        return
    say("building and installing gnsilu, with its C++ tests")
    environment.pip(
        *("install", "--verbose", "--no-build-isolation", "--no-deps", "."),
        GNSILU_BUILD_TESTS="ON",
        GNSILU_BUILD_DIR=build,
    )
    environment.mark_done("gnsilu", what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--build", required=True, help="CMake's build folder")
    parser.add_argument("--torch", required=True, help="version of torch, such as 2.11.0")
    parser.add_argument("extras", nargs="*", help="test, demo, lint: extras of pyproject.toml")
    options = parser.parse_args()

    environment = Environment(options.venv.absolute())
    if not environment.done_for():
        say("checking the machine")
        check_machine()
    environment.create()
    environment.install("pip", ["pip>=24"], "pip")
    torch = [f"torch=={options.torch}"]
    environment.install("torch", torch, f"torch {options.torch} (some GB, this takes a while)")
    lists = project_requirements(environment)
    environment.install("tools", lists["build"] + lists["run"] + torch, "build tools")
    for extra in options.extras:
        environment.install(extra, lists[extra] + torch, f"what '{extra}' needs")
    if options.extras != ["lint"]:
        install_nvcc(environment)
        install_gnsilu(environment, options.build)


if __name__ == "__main__":
    main()
