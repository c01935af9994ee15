"""Makes one wheel of wheels of gnsilu that were each built for another minor version of torch.

    python tools/merge_wheels.py --output dist build/wheels/*.whl

The torch folders (gnsilu/lib/torchX.Y) of all go into it; everything else is there once, and has to
be the same in all of them, byte for byte. So what is installed beside an op library is what that
library was linked to. `make wheel TORCH="2.11.0 2.15.0"` builds such wheels and calls this.

Needs the package `wheel`, which knows the format.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipInfo

from wheel.wheelfile import WheelError, WheelFile

TORCH_FOLDER = re.compile(r"gnsilu/lib/torch(\d+)\.(\d+)/")
# Of METADATA, what says which torch a wheel is for.
VERSION = re.compile(r"^Version: ([^+\n]+)(\+\S*)?$", re.MULTILINE)
REQUIREMENT = re.compile(r"^Requires-Dist: torch[ =<>!~].*$", re.MULTILINE)

Minor = tuple[int, int]


class CannotMergeError(Exception):
    """Why there is no wheel that does what all of these do."""


@dataclass(frozen=True)
class Wheel:
    """What is in one, without what its name and its RECORD say again."""

    path: Path
    version: str
    """Without the part that names torch."""
    tags: str
    """For which Python and platform, as in the name."""
    minors: frozenset[Minor]
    files: dict[str, tuple[ZipInfo, bytes]]
    """By path; for those of .dist-info by their path in it, after ".dist-info/"."""

    def common(self) -> dict[str, bytes]:
        """What does not depend on torch."""
        files = {
            name: data for name, (_, data) in self.files.items() if not TORCH_FOLDER.match(name)
        }
        metadata = files[".dist-info/METADATA"].decode()
        metadata = VERSION.sub("Version", REQUIREMENT.sub("Requires-Dist: torch", metadata))
        files[".dist-info/METADATA"] = metadata.encode()
        del files[".dist-info/WHEEL"]  # the tags, which the name has, and which tool wrote it
        return files


def read(path: Path) -> Wheel:
    try:
        with WheelFile(path) as archive:  # which checks each file's hash in RECORD
            parts = archive.parsed_filename
            folder = archive.dist_info_path
            files = {
                info.filename.replace(folder, ".dist-info", 1): (info, archive.read(info))
                for info in archive.infolist()
                if not info.is_dir() and info.filename != archive.record_path
            }
    except (OSError, WheelError, BadZipFile) as error:
        raise CannotMergeError(f"{path}: {error}") from None
    minors = frozenset(
        (int(found[1]), int(found[2])) for name in files if (found := TORCH_FOLDER.match(name))
    )
    metadata = files.get(".dist-info/METADATA", (None, b""))[1].decode()
    if not (minors and VERSION.search(metadata) and REQUIREMENT.search(metadata)):
        raise CannotMergeError(
            f"{path}: not a wheel of gnsilu for a torch; `make wheel` builds such ones"
        )
    version = parts["ver"].partition("+")[0]
    tags = "-".join((parts["pyver"], parts["abi"], parts["plat"]))
    return Wheel(path, version, tags, minors, files)


def check(wheels: list[Wheel]) -> None:
    """Whether they differ in nothing but what belongs to torch."""
    first = wheels[0]
    seen: dict[Minor, Path] = {}
    for wheel in wheels:
        for minor in sorted(wheel.minors):
            if minor in seen:
                raise CannotMergeError(
                    f"{seen[minor]} and {wheel.path} are both for torch {name_of(minor)}"
                )
            seen[minor] = wheel.path
        for what in ("version", "tags"):
            ours, theirs = getattr(first, what), getattr(wheel, what)
            if ours != theirs:
                raise CannotMergeError(
                    f"{first.path} and {wheel.path} differ in their {what}: {ours}, {theirs}"
                )
        ours, theirs = first.common(), wheel.common()
        names = sorted(ours.keys() | theirs.keys())
        differing = [name for name in names if ours.get(name) != theirs.get(name)]
        if differing:
            raise CannotMergeError(
                f"{first.path} and {wheel.path} differ in {', '.join(differing)}: build them from "
                "the same sources, with the same compilers and GNSILU_CUDA_ARCHITECTURES, for "
                "torches of one CUDA version (its major), or all with GNSILU_CUDA=0"
            )
    if len({major for major, _ in seen}) > 1:
        served = ", ".join(map(name_of, sorted(seen)))
        raise CannotMergeError(f"torch {served}: a requirement cannot name two major versions")


def name_of(minor: Minor) -> str:
    return f"{minor[0]}.{minor[1]}"


def requirement(minors: list[Minor]) -> str:
    """What pip is to accept: these minor versions, those between them not, pre-releases too."""
    (major, oldest), (_, newest) = minors[0], minors[-1]
    gaps = [minor for minor in range(oldest, newest) if (major, minor) not in minors]
    # .dev0 comes before every pre-release, such as the 2.11.0a0+… of a torch built from source.
    limits = [f">={major}.{oldest}.dev0", f"<{major}.{newest + 1}.dev0"]
    return "torch" + ",".join([*limits, *(f"!={major}.{minor}.*" for minor in gaps)])


def merge(paths: list[Path], output: Path) -> Path:
    """Writes the wheel into output and returns its path.

    Raises:
        CannotMergeError: the wheels cannot be one; nothing is written.
    """
    wheels = [read(path) for path in paths]
    check(wheels)
    first = wheels[0]
    minors = sorted(minor for wheel in wheels for minor in wheel.minors)
    version = f"{first.version}+{'.'.join(f'torch{name_of(minor)}' for minor in minors)}"

    files = {name: file for wheel in reversed(wheels) for name, file in wheel.files.items()}
    info, metadata = files[".dist-info/METADATA"]
    text = VERSION.sub(f"Version: {version}", metadata.decode(), count=1)
    text = REQUIREMENT.sub(f"Requires-Dist: {requirement(minors)}", text, count=1)
    files[".dist-info/METADATA"] = (info, text.encode())

    output.mkdir(parents=True, exist_ok=True)
    merged = output / f"gnsilu-{version}-{first.tags}.whl"
    # Under its name at once or not at all; the name says what WheelFile writes into RECORD.
    with tempfile.TemporaryDirectory(dir=output) as folder:
        unfinished = Path(folder) / merged.name
        with WheelFile(unfinished, "w", ZIP_DEFLATED) as archive:
            # .dist-info at the end, as the format recommends.
            for name in sorted(files, key=lambda name: (name.startswith(".dist-info"), name)):
                old, data = files[name]
                path = name.replace(".dist-info", archive.dist_info_path, 1)
                new = ZipInfo(path if name.startswith(".dist-info") else name, old.date_time)
                new.external_attr = old.external_attr  # who may execute it
                archive.writestr(new, data, ZIP_DEFLATED)
        unfinished.replace(merged)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder of the result")
    parser.add_argument("wheels", type=Path, nargs="+", help="one for each minor version of torch")
    options = parser.parse_args()
    if len(options.wheels) < 2:
        parser.error(f"wheels: two or more are wanted, got {options.wheels[0]} alone")
    try:
        print(merge(options.wheels, options.output))
    except CannotMergeError as error:
        sys.exit(f"merge_wheels: {error}")


if __name__ == "__main__":
    main()
