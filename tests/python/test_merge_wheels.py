"""tools/merge_wheels.py on invented wheels: what it makes of them, and which it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
from packaging.requirements import Requirement

wheelfile = pytest.importorskip("wheel.wheelfile", reason="needs the package wheel")

import merge_wheels  # noqa: E402, it needs that package, too

KERNELS = "gnsilu/lib/libgnsilu_kernels.so"
METADATA = """\
Metadata-Version: 2.4
Name: gnsilu
Version: {version}
Requires-Dist: torch=={minor}.*
Requires-Dist: rich

Version: of the description, which begins here and says
Requires-Dist: torch too
"""


def write_wheel(
    folder: Path,
    minor: str,
    *,
    version: str = "1.2",
    tags: str = "cp312-cp312-linux_x86_64",
    **changed: bytes,
) -> Path:
    """A wheel for a minor version of torch; changed: other contents of "kernels" or "python"."""
    version = f"{version}+torch{minor}"
    path = folder / f"gnsilu-{version}-{tags}.whl"
    about = f"gnsilu-{version}.dist-info"
    files = {
        f"{about}/METADATA": METADATA.format(version=version, minor=minor).encode(),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: for {minor}\nTag: {tags}\n".encode(),
        "gnsilu/__init__.py": changed.get("python", b"pass"),
        KERNELS: changed.get("kernels", b"kernels"),
        f"gnsilu/lib/torch{minor}/libgnsilu_ops.so": f"ops {minor}".encode(),
    }
    with wheelfile.WheelFile(path, "w") as archive:
        for name, data in files.items():
            info = ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            info.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(info, data)
    return path


def merge(folder: Path, *wheels: Path) -> Path:
    return merge_wheels.merge(list(wheels), folder / "merged")


def test_one_wheel_has_the_libraries_of_all(tmp_path: Path) -> None:
    wheels = [write_wheel(tmp_path, minor) for minor in ("2.11", "2.9", "2.10")]
    merged = merge(tmp_path, *wheels)
    version = "1.2+torch2.9.torch2.10.torch2.11"
    assert merged.name == f"gnsilu-{version}-cp312-cp312-linux_x86_64.whl"
    assert [path.name for path in merged.parent.iterdir()] == [merged.name]
    with wheelfile.WheelFile(merged) as archive:
        names = archive.namelist()
        about = f"gnsilu-{version}.dist-info"
        assert names == [
            *("gnsilu/__init__.py", KERNELS, "gnsilu/lib/torch2.10/libgnsilu_ops.so"),
            *(f"gnsilu/lib/torch{minor}/libgnsilu_ops.so" for minor in ("2.11", "2.9")),
            *(f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
        ]
        # Reading compares with the hashes in RECORD.
        contents = {name: archive.read(name) for name in names}
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert contents[KERNELS] == b"kernels" and modes[KERNELS] == 0o755
    assert contents["gnsilu/lib/torch2.9/libgnsilu_ops.so"] == b"ops 2.9"
    metadata = METADATA.replace("=={minor}.*", ">=2.9.dev0,<2.12.dev0").format(version=version)
    assert contents[f"{about}/METADATA"].decode() == metadata
    assert b"Tag: cp312-cp312-linux_x86_64\n" in contents[f"{about}/WHEEL"]


def test_a_merged_wheel_takes_one_more(tmp_path: Path) -> None:
    first = merge(tmp_path, write_wheel(tmp_path, "2.9"), write_wheel(tmp_path, "2.12"))
    merged = merge(tmp_path, first, write_wheel(tmp_path, "2.10"))
    assert merged.name.startswith("gnsilu-1.2+torch2.9.torch2.10.torch2.12-")


@pytest.mark.parametrize(
    ("served", "text"),
    [
        ([(2, 11), (2, 12)], "torch>=2.11.dev0,<2.13.dev0"),
        ([(2, 9), (2, 11), (2, 13)], "torch>=2.9.dev0,<2.14.dev0,!=2.10.*,!=2.12.*"),
    ],
)
def test_pip_gets_a_torch_that_is_served_and_no_other(
    served: list[tuple[int, int]], text: str
) -> None:
    assert merge_wheels.requirement(served) == text
    specifier = Requirement(text).specifier
    for number in range(30):
        for version in (f"2.{number}.0", f"2.{number}.1+cu130", f"2.{number}.0a0+git1234567"):
            wanted = (2, number) in served
            assert specifier.contains(version, prereleases=True) == wanted, version


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kernels": b"for another GPU"}, f"differ in {KERNELS}: build them from the same sources"),
        ({"python": b"newer"}, "differ in gnsilu/__init__.py: "),
        ({"version": "1.3"}, r"differ in their version: 1\.2, 1\.3"),
        ({"tags": "cp313-cp313-linux_x86_64"}, "differ in their tags: cp312-.*, cp313-"),
        ({"minor": "3.0"}, r"torch 2\.11, 3\.0: a requirement cannot name two major versions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wheels_that_disagree_are_refused(
    other: dict[str, object], message: str, tmp_path: Path
) -> None:
    wheels = [write_wheel(tmp_path, "2.11")]
    wheels.append(write_wheel(tmp_path, **{"minor": "2.15", **other}))  # type: ignore[arg-type]
    with pytest.raises(merge_wheels.CannotMergeError, match=message):
        merge(tmp_path, *wheels)
    assert not (tmp_path / "merged").exists()


def test_a_torch_cannot_be_served_twice(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "2.11")
    with pytest.raises(merge_wheels.CannotMergeError, match=r"are both for torch 2\.11"):
        merge(tmp_path, wheel, write_wheel(tmp_path, "2.15"), wheel)


def test_what_is_no_wheel_of_gnsilu_is_refused(tmp_path: Path) -> None:
    good = write_wheel(tmp_path, "2.11")
    other = tmp_path / "other-1.0-py3-none-any.whl"
    with wheelfile.WheelFile(other, "w") as archive:
        archive.writestr("other-1.0.dist-info/METADATA", "Name: other\nVersion: 1.0\n")
    text = tmp_path / "gnsilu-1.0-py3-none-any.whl"
    text.write_text("no archive")
    damaged = write_wheel(tmp_path, "2.15")
    with ZipFile(damaged, "a") as archive:
        archive.writestr("gnsilu/not_in_record.py", "")
    for path in (other, text, damaged, tmp_path / "missing-1.0-py3-none-any.whl", tmp_path / "a"):
        with pytest.raises(merge_wheels.CannotMergeError, match=re.escape(path.name)):
            merge(tmp_path, good, path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.whl"], "wheels: two or more are wanted, got one.whl alone"),
        (["gnsilu-1-py3-none-any.whl"] * 2, "merge_wheels: gnsilu-1-py3-none-any.whl: "),
    ],
    ids=["one", "missing"],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, merge_wheels.__file__, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr
    assert "Traceback" not in done.stderr
