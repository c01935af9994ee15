"""The device code in a library that nvcc made.

`cuobjdump --list-elf --list-ptx` lists it, too, but needs the CUDA toolkit. A fat binary is a
header (magic number, version, header size, size of the rest) followed by entries, each with a
header (kind, version, header size, payload size, ..., architecture at byte 28) of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = (0xBA55ED50).to_bytes(4, "little")
_KINDS = {1: "compute", 2: "sm"}
_ARCHITECTURE = 28  # bytes into an entry


def _entries(library: bytes) -> Iterator[int]:
    """Where the entries of all fat binaries start."""
    start = library.find(_MAGIC)
    while start >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, start)
        entry, end = start + header, start + header + size
        while entry < end:
            yield entry
            _, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            entry += header + size
        start = library.find(_MAGIC, end)


def device_code(library: bytes) -> set[str]:
    """What a library holds: "sm_90" for machine code, "compute_90" for PTX."""
    found = set()
    for entry in _entries(library):
        (kind,) = struct.unpack_from("<H", library, entry)
        (architecture,) = struct.unpack_from("<I", library, entry + _ARCHITECTURE)
        found.add(f"{_KINDS[kind]}_{architecture}")
    return found


def made_for(library: bytes, architecture: int) -> bytes:
    """The library with all its device code under the name of another architecture."""
    changed = bytearray(library)
    for entry in _entries(library):
        struct.pack_into("<I", changed, entry + _ARCHITECTURE, architecture)
    return bytes(changed)
