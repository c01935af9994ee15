"""The tuner on a GPU: when it runs, what it stores, that it never changes a result."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
from gnsilu import _C
from processes import run_python

pytestmark = pytest.mark.gpu

CALL = """
    import json, torch, gnsilu
    from dataclasses import asdict
    torch.manual_seed(0)
    x = torch.randn({shape}, device="cuda").to(torch.bfloat16)
    version = x._version
    before = gnsilu.explain(x, {groups}).config
    {setup}
    y = gnsilu.group_norm_silu(x, {groups})
    torch.cuda.synchronize()
    assert x._version == version
    after = gnsilu.explain(x, {groups}).config
    print(json.dumps([asdict(before), asdict(after), y.float().sum().item()]))
"""
DEFAULT = {"threads": 128, "vectors_in_flight": 8}
SHAPE = (1, 64, 701, 701)  # two_pass: the ring takes no groups that end within 16 bytes
WARNING = "gnsilu: launch tuner: "


def call(
    folder: Path, setup: str = "", shape=SHAPE, groups: int = 32, **environment: str
) -> tuple[list, str]:
    code = textwrap.dedent(CALL).format(setup=setup, shape=shape, groups=groups)
    result = run_python(code, GNSILU_CACHE_DIR=str(folder), **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def entries(folder: Path) -> list[dict]:
    files = list(folder.glob("*.json"))
    assert len(files) <= 1
    return json.loads(files[0].read_text())["entries"] if files else []


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, list]:
    """A folder that one process has tuned into, and what that process saw."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, call(folder)[0]


def test_tunes_and_stores_what_it_found(tuned):
    folder, (before, after, _) = tuned
    assert before == DEFAULT
    (stored,) = entries(folder)
    assert stored["config"] == after and stored["microseconds"] > 0
    assert stored["channels_per_group"] == 2 and stored["x_dtype"] == "bfloat16"


def test_case_49_the_second_process_does_not_tune(tuned):
    folder, (_, after, total) = tuned
    stored = entries(folder)
    (found, _, same_total), stderr = call(folder)
    assert found == after and same_total == total
    assert entries(folder) == stored  # no tuning, or the time would differ
    assert WARNING not in stderr


def test_case_49_timings_under_another_driver_are_not_used(tuned, tmp_path):
    (path,) = tuned[0].glob("*.json")
    document = json.loads(path.read_text())
    document["entries"][0]["driver_version"] += 10
    document["entries"][0]["config"] = {"threads": 256, "vectors_in_flight": 4}
    (tmp_path / path.name).write_text(json.dumps(document))
    (before, _, total), stderr = call(tmp_path)
    assert before == DEFAULT and total == tuned[1][2]
    assert WARNING not in stderr
    assert len(entries(tmp_path)) == 2


def test_tunes_on_a_slice_of_large_activations(tmp_path):
    """One group above 256 MiB, with fewer spans than a group of the slice's size would have."""
    shape = (1, 128, 1024, 1025)
    (_, after, _), _ = call(tmp_path, shape=shape, groups=1)
    (stored,) = entries(tmp_path)
    assert stored["config"] == after and stored["channels_per_group"] == 128


ONLY_THE_RESULT_FITS = """
    import torch, gnsilu
    x = torch.randn(1, 64, 701, 701, device="cuda").to(torch.bfloat16)
    torch.cuda.synchronize(); torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    room = x.nbytes + (8 << 20)  # the result, and the rounding of the allocator's segments
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    y = gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    torch.cuda.set_per_process_memory_fraction(1.0)  # the check, too, takes memory
    print(y.isfinite().all().item())
"""


def test_case_42_tuning_takes_no_memory_of_its_own(tmp_path):
    program = textwrap.dedent(ONLY_THE_RESULT_FITS)
    result = run_python(program, GNSILU_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0 and result.stdout.split() == ["True"], result.stderr
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize(
    ("setup", "environment"),
    [
        ("", {"GNSILU_TUNE": "0"}),
        ("torch.use_deterministic_algorithms(True)", {}),
        ("x = x[:, :, :350].contiguous()", {}),  # below 32 MiB, still two_pass
    ],
    ids=["switched off", "deterministic", "small"],
)
def test_default_configuration_where_tuning_is_off(setup, environment, tmp_path):
    (_, after, _), _ = call(tmp_path, setup, **environment)
    assert after == DEFAULT
    assert entries(tmp_path) == []


def test_case_38_nothing_is_tuned_under_capture(tmp_path):
    setup = textwrap.dedent("""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gnsilu.group_norm_silu(x, 32)
        assert asdict(gnsilu.explain(x, 32).config) == {"threads": 128, "vectors_in_flight": 8}
        raise SystemExit(print(json.dumps([0, 0, 0])))
    """)
    call(tmp_path, setup)
    assert entries(tmp_path) == []


# --- Files that are of no use -------------------------------------------------------------------


def half_written(text: str) -> str:
    return text[: len(text) // 2]


def block_size_of_3(text: str) -> str:
    document = json.loads(text)
    document["entries"][0]["config"]["threads"] = 3
    return json.dumps(document)


def of_another_gpu(text: str) -> str:
    document = json.loads(text)
    document["gpu"] = "Other"
    return json.dumps(document)


def assert_heals(tuned, folder: Path, spoil) -> None:
    """One warning, the default, the right result; and a good file afterwards."""
    (path,) = tuned[0].glob("*.json")
    spoilt = folder / path.name
    spoilt.write_text(spoil(path.read_text()))
    (before, _, total), stderr = call(folder)
    assert before == DEFAULT and total == tuned[1][2]
    assert stderr.count(WARNING) == stderr.count(path.name) == 1, stderr
    assert len(entries(folder)) == 1
    assert _C.read_tuner_file(spoilt, torch.cuda.get_device_name()).fault == ""


@pytest.mark.parametrize("spoil", [half_written, block_size_of_3])
def test_case_47_spoilt_file_gives_one_warning_and_the_right_result(tuned, spoil, tmp_path):
    assert_heals(tuned, tmp_path, spoil)


def test_case_49_file_of_another_gpu_gives_one_warning_and_the_right_result(tuned, tmp_path):
    assert_heals(tuned, tmp_path, of_another_gpu)


def test_case_48_unwritable_folder_gives_one_warning_and_the_right_result(tuned, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    (_, _, again), stderr = call(blocked / "folder")
    assert again == tuned[1][2]
    assert stderr.count(WARNING) == 1, stderr
