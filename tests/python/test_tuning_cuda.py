"""The tuner on a GPU: when it runs, what it stores, that it never changes a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CALL = """
    import json, sys, torch, gnsilu
    x = torch.randn({shape}, device="cuda").to(torch.bfloat16)
    version = x._version
    before = gnsilu.explain(x, {groups}).config
    {setup}
    y = gnsilu.group_norm_silu(x, {groups})
    torch.cuda.synchronize()
    from dataclasses import asdict
    assert x._version == version
    after = gnsilu.explain(x, {groups}).config
    print(json.dumps([asdict(before), asdict(after), y.float().sum().item()]))
"""
DEFAULT = {"threads": 128, "vectors_in_flight": 8}


SHAPE = (1, 64, 700, 700)


def call(
    folder: Path, setup: str = "", shape=SHAPE, groups: int = 32, **environment: str
) -> tuple[list, str]:
    code = textwrap.dedent(CALL).format(setup=setup, shape=shape, groups=groups)
    result = subprocess.run(
        [sys.executable, "-c", "import torch; torch.manual_seed(0)\n" + code],
        env={**os.environ, "GNSILU_CACHE_DIR": str(folder), **environment},
        text=True,
        capture_output=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def entries(folder: Path) -> list[dict]:
    files = list(folder.glob("*.json"))
    assert len(files) <= 1
    return json.loads(files[0].read_text())["entries"] if files else []


def test_tunes_once_and_the_second_process_reads_it(tmp_path):
    (before, after, total), _ = call(tmp_path)
    assert before == DEFAULT
    (stored,) = entries(tmp_path)
    assert stored["config"] == after and stored["microseconds"] > 0
    assert stored["channels_per_group"] == 2 and stored["x_dtype"] == "bfloat16"
    (found, _, same_total), _ = call(tmp_path)
    assert found == after and same_total == total
    assert entries(tmp_path) == [stored]  # no tuning, or the time would differ


def test_tunes_on_a_slice_of_large_activations(tmp_path):
    """One group above 256 MiB, with fewer spans than a group of the slice's size would have."""
    shape = (1, 128, 1024, 1025)
    (_, after, _), _ = call(tmp_path, shape=shape, groups=1)
    (stored,) = entries(tmp_path)
    assert stored["config"] == after and stored["channels_per_group"] == 128


ONLY_THE_RESULT_FITS = """
    import torch, gnsilu
    x = torch.randn(1, 64, 700, 700, device="cuda").to(torch.bfloat16)
    torch.cuda.synchronize(); torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    room = x.nbytes + (8 << 20)  # the result, and the rounding of the allocator's segments
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    y = gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    torch.cuda.set_per_process_memory_fraction(1.0)  # the check, too, takes memory
    print(y.isfinite().all().item())
"""


def test_tuning_takes_no_memory_of_its_own(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ONLY_THE_RESULT_FITS)],
        env={**os.environ, "GNSILU_CACHE_DIR": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0 and result.stdout.split() == ["True"], result.stderr
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize(
    ("setup", "environment"),
    [
        ("", {"GNSILU_TUNE": "0"}),
        ("torch.use_deterministic_algorithms(True)", {}),
        ("x = x[:, :, :64].contiguous()", {}),  # below 32 MiB
    ],
)
def test_default_configuration_where_tuning_is_off(setup, environment, tmp_path):
    (_, after, _), _ = call(tmp_path, setup, **environment)
    assert after == DEFAULT
    assert entries(tmp_path) == []


def test_nothing_is_tuned_under_capture(tmp_path):
    setup = textwrap.dedent("""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gnsilu.group_norm_silu(x, 32)
        assert asdict(gnsilu.explain(x, 32).config) == {"threads": 128, "vectors_in_flight": 8}
        raise SystemExit(print(json.dumps([0, 0, 0])))
    """)
    setup = "from dataclasses import asdict\n" + setup
    code = textwrap.dedent(CALL).format(setup=setup, shape=SHAPE, groups=32)
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "GNSILU_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    assert entries(tmp_path) == []


def spoil(path: Path, how: str) -> None:
    text = path.read_text()
    if how == "corrupt":
        path.write_text(text[: len(text) // 2])
    elif how == "foreign":
        path.write_text(text.replace("NVIDIA", "Other"))
    elif how == "not a candidate":
        document = json.loads(text)
        document["entries"][0]["config"]["threads"] = 3
        path.write_text(json.dumps(document))


@pytest.mark.parametrize("how", ["corrupt", "foreign", "not a candidate"])
def test_spoilt_file_gives_one_warning_and_the_right_result(how, tmp_path):
    (_, _, total), _ = call(tmp_path)
    (path,) = tmp_path.glob("*.json")
    spoil(path, how)
    (before, _, again), stderr = call(tmp_path)
    assert before == DEFAULT and again == total
    assert stderr.count(path.name) == 1, stderr
    assert len(entries(tmp_path)) == 1  # healed
    assert call(tmp_path)[1].count(path.name) == 0


def test_unwritable_folder_gives_one_warning_and_the_right_result(tmp_path):
    (_, _, total), _ = call(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    (_, _, again), stderr = call(blocked / "folder")
    assert again == total
    assert stderr.count("Warning") == 1, stderr
