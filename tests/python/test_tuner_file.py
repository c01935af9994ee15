"""The tuner's file in every damaged state: one warning, the default, and later a good file."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from gnsilu import _C
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tuner_helpers import CANDIDATES, GPU, THREE_PASS, heals, key, tune_twice, winner

TOO_LARGE = b" " * 5_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _C.tuner_file_path(tmp_path, GPU)


@functools.cache
def good_text(path: Path) -> bytes:
    """What a file of two entries holds, for the keys of 4 and of 16 channels per group."""
    for n in (4, 16):
        entry = _C.TunerEntry(
            key=key(n), config=winner(n), microseconds=512.5, made="2026-01-31T12:00:00Z"
        )
        assert _C.write_tuner_entry(path, entry) == ""
    text = path.read_bytes()
    path.unlink()
    return text


# --- Not one of our files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"gnsilu tuner"',
        b"{}",
        b"\xff\x00\x80",
        b"\x00" * 4096,  # what a crash of the machine may leave
        b"\x1f\x8b\x08" + bytes(range(256)),
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        TOO_LARGE,
        b'{"format": "another", "version": 1, "gpu": "NVIDIA Invented", "entries": []}',
        b'{"version": 1, "gpu": "NVIDIA Invented", "entries": []}',
        *(
            b'{"format": "gnsilu tuner", "version": %s, "gpu": "NVIDIA Invented", "entries": []}'
            % version
            for version in (b"0", b"2", b"99", b"-1", b"1.0", b'"1"', b"null", b"[1]", b"1e999")
        ),
        *(
            b'{"format": "gnsilu tuner", "version": 1, "gpu": "NVIDIA Invented", "entries": %s}'
            % entries
            for entries in (b"{}", b"null", b"5", b"[5]", b"[[]]", b"[null]", b'["x"]', b"[{}]")
        ),
        b'{"format": "gnsilu tuner", "version": 1, "gpu": "NVIDIA Invented"}',
        b'{"format": "gnsilu tuner", "version": 1, "gpu": 5, "entries": []}',
    ],
    ids=lambda text: repr(text[-60:]),
)
def test_case_47_a_bad_file_gives_one_warning_and_is_replaced(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    (warning,) = heals(path.parent, path)
    assert str(path) in warning


def test_case_47_every_half_written_file(path: Path) -> None:
    text = good_text(path)
    # Without its last byte, the line's end, it is whole.
    for size in range(len(text) - 1):
        path.write_bytes(text[:size])
        warnings: list[str] = []
        tuner = _C.Tuner(path.parent, warnings.append)
        assert tuner.find(key(4)) is tuner.find(key(16)) is None
        assert len(warnings) == 1
        assert str(path) in warnings[0]
        if size % 20 == 0:  # the rest takes flushing to the disk
            assert heals(path.parent, path) == warnings


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_case_47_any_damage(path: Path, data: st.DataObject) -> None:
    """Bytes changed, lost and added anywhere: what is used is a candidate, and it heals."""
    text = bytearray(good_text(path))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 0, 1, 2, 40])))
        text[start:end] = data.draw(st.binary(max_size=4))
    path.write_bytes(text)
    warnings: list[str] = []
    tuner = _C.Tuner(path.parent, warnings.append)
    for channels_per_group in (4, 8, 16):
        found = tuner.find(key(channels_per_group))
        assert found is None or found in CANDIDATES
    assert len(warnings) <= 1
    tuned = tuner.tune(key(32), lambda config: 1.0 if config == winner(32) else 2.0)
    assert tuned == winner(32)
    assert len(warnings) <= 1
    later = _C.Tuner(path.parent, pytest.fail)
    assert later.find(key(32)) == winner(32)


# --- Bad entries in a good file ---------------------------------------------------------------

# As JSON: what a field of that kind must not be, beside being absent.
NO_INTEGER = ["null", "true", '"8"', "8.0", "1.5", "[]", "{}", "[8]", "-1", str(2**63), str(2**64)]
NO_TEXT = ["null", "true", "5", "[]", "{}"]
NO_DTYPE = [*NO_TEXT, '""', '"int8"', '"BFloat16"', '"torch.bfloat16"']
BAD_VALUES = {
    "sm_count": [*NO_INTEGER, "0", str(2**31)],
    "driver_version": [*NO_INTEGER, str(2**31)],
    "kernels": NO_TEXT,
    "route": [*NO_TEXT, '""', '"auto"', '"quickest"'],
    "channels_per_group": [*NO_INTEGER, "0"],
    "x_dtype": NO_DTYPE,
    "y_dtype": NO_DTYPE,
    "config": ["null", "5", '"128"', "[]", "{}", '[{"threads": 128, "vectors_in_flight": 4}]'],
    "config.threads": [*NO_INTEGER, "0", "3", "31", "33", "2048", str(2**31), str(2**32 + 128)],
    "config.vectors_in_flight": [*NO_INTEGER, "0", str(2**31), str(2**32 + 4)],
    "microseconds": ["null", "true", '"1.0"', "[]", "0", "-0.0", "-1.0", '"NaN"'],
    "made": NO_TEXT,
}
# These are no JSON at all: not an entry but the file is lost.
NO_NUMBERS = ["NaN", "nan", "Infinity", "-Infinity", "1e999", "0x10", "1.", "+1"]


def with_field(text: bytes, field: str, value: str | None) -> str:
    """The text with a field of its first entry as that JSON; None takes it out."""
    document = json.loads(text)
    *parents, name = field.split(".")
    place: dict[str, Any] = document["entries"][0]
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[name]
        return json.dumps(document)
    place[name] = "HERE"
    return json.dumps(document).replace('"HERE"', value)


@pytest.mark.parametrize("field", BAD_VALUES)
def test_case_47_a_bad_field_costs_its_entry_alone(path: Path, field: str) -> None:
    text = good_text(path)
    for value in (None, *BAD_VALUES[field]):
        path.write_text(with_field(text, field, value))
        tuner = _C.Tuner(path.parent, lambda message: None)
        assert (tuner.find(key(4)), tuner.find(key(16))) == (None, winner(16)), value
        (warning,) = heals(path.parent, path)
        assert f"'{path}' has 1 malformed of 2 entries" in warning
        assert _C.Tuner(path.parent, pytest.fail).find(key(16)) == winner(16)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_case_47_a_time_that_is_no_json(path: Path, value: str) -> None:
    path.write_text(with_field(good_text(path), "microseconds", value))
    (warning,) = heals(path.parent, path)
    assert f"'{path}' is not a JSON object" in warning


def test_case_47_a_configuration_that_is_no_candidate_is_never_used(path: Path) -> None:
    """Well-formed entries, of another list of candidates perhaps: passed over without a word."""
    document = json.loads(good_text(path))
    (template, _) = document["entries"]
    others = [
        (threads, vectors)
        for threads in range(32, 1025, 32)
        for vectors in (1, 2, 3, 4, 8, 16, 2**31 - 1)
        if _C.Config(threads=threads, vectors_in_flight=vectors) not in CANDIDATES
    ]
    document["entries"] = [
        template
        | {"config": {"threads": threads, "vectors_in_flight": vectors}, "channels_per_group": i}
        for i, (threads, vectors) in enumerate(others, start=1)
    ]
    path.write_text(json.dumps(document))
    assert len(_C.read_tuner_file(path, GPU).entries) == len(others) > 200
    tuner = _C.Tuner(path.parent, pytest.fail)
    for i in range(1, len(others) + 1):
        assert tuner.find(key(i)) is None
    assert tuner.tune(key(1), lambda config: None) == _C.candidates(THREE_PASS)[0]
    assert heals(path.parent, path) == []


# --- Something else of that name --------------------------------------------------------------


def test_case_47_a_folder_of_that_name(path: Path) -> None:
    path.mkdir()
    (path / "mine").touch()
    warnings, good = tune_twice(path.parent)
    assert good
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    (path / "mine").unlink()  # an empty one gives way
    (warning,) = heals(path.parent, path)
    assert str(path) in warning


def test_case_47_a_pipe_of_that_name(path: Path) -> None:
    os.mkfifo(path)
    (warning,) = heals(path.parent, path)
    assert str(path) in warning


def test_case_47_a_link_of_that_name_that_leads_round(path: Path) -> None:
    path.symlink_to(path)
    (warning,) = heals(path.parent, path)
    assert str(path) in warning


def test_case_47_a_link_of_that_name_that_leads_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "missing")
    assert heals(path.parent, path) == []
    assert not (path.parent / "missing").exists()
