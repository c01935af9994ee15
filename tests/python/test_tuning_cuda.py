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
    x = torch.randn(1, 64, 700, 700, device="cuda").to(torch.bfloat16)
    version = x._version
    before = gnsilu.explain(x, 32).config
    {setup}
    y = gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    from dataclasses import asdict
    assert x._version == version
    after = gnsilu.explain(x, 32).config
    print(json.dumps([asdict(before), asdict(after), y.float().sum().item()]))
"""
DEFAULT = {"threads": 128, "vectors_in_flight": 8}


def call(folder: Path, setup: str = "", **environment: str) -> tuple[list, str]:
    code = textwrap.dedent(CALL).format(setup=setup)
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
    code = textwrap.dedent(CALL).replace("{setup}", "from dataclasses import asdict\n" + setup)
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
