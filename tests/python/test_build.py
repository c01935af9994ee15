"""The installed package: what importing it does and does not do, and what it says of its build."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import gnsilu
import pytest
import setup_env
import torch
from fat_binary import device_code
from packaging.requirements import Requirement
from processes import output_of, run_python
from programs import KERNELS

PACKAGE = Path(gnsilu.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
TORCH_FOLDER = f"torch{MINOR}"
# Asserts that the ops work, whichever way they were loaded.
CALL = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from reference import assert_exact
x = torch.arange(48.0).sin().view(1, 4, 3, 4).half()
assert_exact(torch.ops.gnsilu.group_norm_silu(x, 2), x, 2)
"""


def copy_of_package(folder: Path) -> Path:
    """A copy of the installed package, to be damaged; PYTHONPATH=folder imports it."""
    return Path(shutil.copytree(PACKAGE, folder / "gnsilu"))


# --- Import -----------------------------------------------------------------------------------


def test_case_51_import_initialises_no_cuda() -> None:
    output_of(f"import gnsilu, torch\nassert not torch.cuda.is_initialized()\n{CALL}")


def test_case_51_import_works_without_a_gpu() -> None:
    program = f"import gnsilu, torch\nassert not torch.cuda.is_available()\n{CALL}"
    output_of(program, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_case_51_cuda_visible_devices_may_be_set_after_import() -> None:
    # The driver reads the variable when it is initialised: importing has not done that.
    program = "import os, gnsilu, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
    assert output_of(f"{program}print(torch.cuda.is_available())") == "False"


@pytest.mark.gpu
def test_case_51_cuda_works_in_a_child_forked_after_import() -> None:
    output_of("""
import os, gnsilu, torch
child = os.fork()
if child == 0:
    y = gnsilu.group_norm_silu(torch.ones(1, 4, 64, 64, device="cuda").bfloat16(), 2)
    os._exit(0 if (y == 0).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_import_brings_nothing_heavy() -> None:
    # In the place of a timing: what import torch has not loaded already is gnsilu's own or the
    # standard library's. torch._dynamo alone would take longer than torch itself.
    new = output_of("""
import sys, torch
before = set(sys.modules)
import gnsilu
print(*(name for name in set(sys.modules) - before))
""").split()
    assert "gnsilu._C" in new
    allowed = {"gnsilu", *sys.stdlib_module_names}
    assert [name for name in new if name.partition(".")[0] not in allowed] == []


@pytest.mark.parametrize(
    "program",
    [
        "import importlib, gnsilu\nimportlib.reload(gnsilu)",
        "import gnsilu\ntorch.ops.load_library(gnsilu.library_path())",
        f"torch.ops.load_library({gnsilu.library_path()!r})\nimport gnsilu",
        f"torch.ops.load_library({gnsilu.library_path()!r})\nassert 'gnsilu' not in sys.modules",
    ],
    ids=["twice", "library after", "library before", "library alone"],
)
def test_case_51_the_ops_are_registered_however_they_are_loaded(program: str) -> None:
    output_of(f"import sys, torch\n{program}\n{CALL}")


def test_module_and_ops_share_one_library_of_kernels() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps to list the loaded libraries")
    files = {line.split()[-1] for line in maps.read_text().splitlines() if "libgnsilu_" in line}
    assert files == {str(Path(path).resolve()) for path in (gnsilu.library_path(), KERNELS)}


def import_error(folder: Path) -> str:
    """What importing the package of that folder fails with."""
    done = run_python("import gnsilu", PYTHONPATH=str(folder))
    assert done.returncode != 0
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("ImportError: ") and "pip install --no-build-isolation" in last
    return last


def test_without_libraries_it_is_not_built(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    shutil.rmtree(package / "lib")
    assert f"gnsilu at {package} is not built" in import_error(tmp_path)


@pytest.mark.parametrize("content", [None, b"\x7fELF, cut short"], ids=["missing", "broken"])
def test_a_library_that_cannot_be_loaded_is_an_import_error(
    content: bytes | None, tmp_path: Path
) -> None:
    library = copy_of_package(tmp_path) / "lib" / TORCH_FOLDER / "libgnsilu_ops.so"
    library.unlink()
    if content is not None:
        library.write_bytes(content)
    message = import_error(tmp_path)
    assert f"libgnsilu_ops.so for torch {gnsilu.build_info().torch}" in message
    assert f"this is torch {torch.__version__}" in message


# --- The library for this torch -----------------------------------------------------------------


def test_a_torch_that_is_not_served_is_an_import_error_that_names_those_that_are(
    tmp_path: Path,
) -> None:
    libraries = copy_of_package(tmp_path) / "lib"
    for folder in libraries.glob("torch*"):
        shutil.rmtree(folder)
    for served in ("1.10", "1.9"):
        (libraries / f"torch{served}").mkdir()
    message = import_error(tmp_path)
    assert f"built for torch 1.9, 1.10; this is torch {torch.__version__}" in message


@pytest.mark.parametrize(
    ("version", "folder"),
    [
        ("2.1.0", "torch2.1"),
        ("2.11.0", "torch2.11"),
        ("2.11.7+cu130", "torch2.11"),
        ("2.11.0a0+git1234567", "torch2.11"),
    ],
)
def test_the_library_is_that_of_torchs_minor_version(
    version: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for served in ("2.1", "2.11"):
        (tmp_path / f"torch{served}").mkdir()
    monkeypatch.setattr("gnsilu.library.LIBRARIES", tmp_path)
    monkeypatch.setattr(torch, "__version__", version)
    assert gnsilu.library_path() == str(tmp_path / folder / "libgnsilu_ops.so")
    assert gnsilu.cmake_prefix_path() == str(tmp_path / folder)


def test_a_folder_for_another_torch_changes_nothing(tmp_path: Path) -> None:
    (copy_of_package(tmp_path) / "lib" / "torch1.13").mkdir()
    program = f"import gnsilu, torch\n{CALL}\nprint(gnsilu.library_path())"
    library = tmp_path / "gnsilu" / "lib" / TORCH_FOLDER / "libgnsilu_ops.so"
    assert output_of(program, PYTHONPATH=str(tmp_path)) == str(library)


# --- The set-up of `make` -----------------------------------------------------------------------


def test_only_what_the_build_reads_makes_it_install_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    source = tmp_path / "python" / "gnsilu" / "module.py"
    written = [
        tmp_path / "python" / "gnsilu.egg-info" / "PKG-INFO",
        tmp_path / "python" / "gnsilu" / "__pycache__" / "module.cpython-312.pyc",
    ]
    for path in (source, *written):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before", "utf-8")
    monkeypatch.delenv("GNSILU_CUDA_ARCHITECTURES", raising=False)
    first = setup_env.source_hash()
    for path in written:
        path.write_text("after", "utf-8")
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    assert setup_env.source_hash() == first
    monkeypatch.setenv("GNSILU_CUDA_ARCHITECTURES", "90")
    assert setup_env.source_hash() != first
    monkeypatch.delenv("GNSILU_CUDA_ARCHITECTURES")
    source.write_text("after", "utf-8")
    assert setup_env.source_hash() != first


def test_torch_2_14_needs_cxx20() -> None:
    versions = ("2.8.0", "2.13.1", "2.14.0", "2.15.0+cpu", "3.0.0")
    assert [setup_env.cxx_standard(version) for version in versions] == [17, 17, 20, 20, 20]


# --- What was built ---------------------------------------------------------------------------


def test_case_52_build_info() -> None:
    info = gnsilu.build_info()
    assert info.version == gnsilu.__version__
    assert info.torch == torch.__version__
    assert re.match(r"(GNU|Clang|AppleClang) \d+\.\d+", info.compiler)
    for fact in (info.version, info.torch, info.compiler):
        assert fact in str(info)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.version = "2"  # type: ignore[misc]


def test_the_package_asks_for_the_torches_that_it_was_built_for() -> None:
    served = {path.name.removeprefix("torch") for path in KERNELS.parent.glob("torch*")}
    assert MINOR in served
    version, _, local = importlib.metadata.version("gnsilu").partition("+")
    assert version == gnsilu.__version__
    assert {part.strip(".") for part in local.split("torch") if part} == served
    wanted = [Requirement(text) for text in importlib.metadata.requires("gnsilu") or []]
    (of_torch,) = (requirement.specifier for requirement in wanted if requirement.name == "torch")
    for minor in (f"{major}.{number}" for major in (1, 2, 3) for number in range(30)):
        for release in (f"{minor}.0", f"{minor}.1+cu130", f"{minor}.0a0+git1234567"):
            assert of_torch.contains(release, prereleases=True) == (minor in served), release


@pytest.mark.skipif(
    int(importlib.metadata.version("setuptools").split(".")[0]) < 77,
    reason="setup.py needs setuptools 77 or newer",
)
def test_sources_ask_for_any_torch(tmp_path: Path) -> None:
    command = ["setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "-d", tmp_path]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("gnsilu-*.tar.gz")
    assert archive.name == f"gnsilu-{gnsilu.__version__}.tar.gz"
    with tarfile.open(archive) as file:
        about = file.extractfile(f"gnsilu-{gnsilu.__version__}/PKG-INFO")
        assert about is not None and "Requires-Dist: torch>=2.8" in about.read().decode()


def test_case_52_build_info_of_the_kernels() -> None:
    info = gnsilu.build_info()
    if not info.cuda:
        assert info.architectures == ()
        assert "CPU only" in str(info)
        return
    assert re.fullmatch(r"\d+\.\d+", info.cuda)
    assert info.cuda.split(".")[0] == str(torch.version.cuda).split(".")[0]
    assert "nvcc" in info.compiler
    # Machine code for each, and PTX of the newest for GPUs to come.
    *machine_code, ptx = info.architectures
    assert machine_code
    assert all(re.fullmatch(r"sm_\d+", name) for name in machine_code)
    assert ptx == machine_code[-1].replace("sm_", "compute_")
    assert all(name in str(info) for name in info.architectures)


def test_case_52_the_kernels_are_in_the_library() -> None:
    # On a machine without a GPU as well: the build does not need one. Without CUDA, nothing.
    assert device_code(KERNELS.read_bytes()) == set(gnsilu.build_info().architectures)


ARCHITECTURES = """
file(READ "${SOURCE}" text)
string(FIND "${text}" "# --- What is built" end)
string(SUBSTRING "${text}" 0 ${end} functions)
cmake_language(EVAL CODE "${functions}")
gnsilu_choose_architectures(nvcc found)
file(WRITE "${FOUND}" "${found}")
"""
ALL = "75 80 86 89 90 100 120"


@pytest.mark.parametrize(
    ("gpus", "nvcc_has", "asked", "wanted"),
    [
        (None, ALL, "", "75-real;80-real;86-real;89-real;90-real;100-real;120"),
        (None, "75 80 86 87 89 90", "", "75-real;80-real;86-real;89-real;90"),
        (None, ALL, "7.5,9.0", "75-real;90"),
        ("9.0", ALL, "", "90"),
        ("12.0 7.5 12.0", ALL, "", "75-real;120"),
        ("9.0", ALL, "100;80", "80-real;100"),
    ],
    ids=str,
)
def test_case_52_without_a_gpu_the_kernels_are_built_for_all(
    gpus: str | None, nvcc_has: str, asked: str, wanted: str, tmp_path: Path
) -> None:
    """What cmake/cuda.cmake makes of the GPUs that nvidia-smi shows; asked goes before them."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake")
    listed = "\n".join(f"compute_{architecture}" for architecture in nvcc_has.split())
    shown = "exit 9" if gpus is None else "printf '%s\\n' " + gpus
    for name, script in (("nvcc", f"printf '%s\\n' '{listed}'"), ("nvidia-smi", shown)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "script.cmake").write_text(ARCHITECTURES)
    settings = {
        "SOURCE": ROOT / "cmake" / "cuda.cmake",
        "FOUND": tmp_path / "found",
        "GNSILU_CUDA_ARCHITECTURES": asked,
    }
    subprocess.run(
        [cmake, *(f"-D{name}={value}" for name, value in settings.items()), "-P", "script.cmake"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / "found").read_text() == wanted


def test_the_package_brings_headers_and_types() -> None:
    installed = {path.name for path in (PACKAGE / "include" / "gnsilu").glob("*.h")}
    assert installed == {path.name for path in (ROOT / "include" / "gnsilu").glob("*.h")}
    assert {"launch.h", "plan.h", "problem.h"} <= installed
    for header in (PACKAGE / "include" / "gnsilu").glob("*.h"):
        assert not re.search(r"#include [<\"](torch|ATen|c10)/", header.read_text("utf-8"))
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_C.pyi").exists()
