"""`python -m gnsilu`, on invented tuner files."""

import subprocess
import sys

import gnsilu
import pytest
import torch
from gnsilu import _C, command_line
from processes import run_python

GPU = "NVIDIA [bold] Invented"  # what rich would take for markup


def entry(channels_per_group, **changes):
    facts = {
        "gpu": GPU,
        "sm_count": 132,
        "driver_version": 12080,
        "kernels": _C.kernel_version,
        "route": _C.Route.three_pass,
        "channels_per_group": channels_per_group,
        "x_dtype": _C.DType.bfloat16,
        "y_dtype": _C.DType.float16,
    }
    return _C.TunerEntry(
        key=_C.TunerKey(**{**facts, **changes}),
        config=_C.Config(threads=128, vectors_in_flight=4),
        microseconds=512.34,
        made="2026-01-31T12:00:00Z",
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("GNSILU_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = command_line.main(arguments)
        return status, capsys.readouterr().out

    return run


def row_of(output, first_cell):
    """The cells of the table's row that begins with first_cell."""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        if cells[0] == first_cell:
            return cells
    raise AssertionError(f"no row {first_cell!r} in:\n{output}")


def test_an_empty_cache(run, folder):
    status, output = run("cache")
    assert status == 0
    assert f"Cache folder: {folder}" in output
    assert "Empty" in output
    assert not folder.exists()
    assert run("cache", "--clear") == (0, f"Cache folder: {folder}\nNothing to remove.\n")


def test_a_cache_that_cannot_be(run, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "cache"):
        monkeypatch.setenv("GNSILU_CACHE_DIR", str(place))
        status, output = run("cache")
        assert status == 0 and f"None can be kept there: {file} is no folder." in output


def test_info_names_a_forced_route_that_cannot_serve(monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", "ring")
    rows = list(command_line._explanations(torch.device("cpu")))
    assert len(rows) == len(command_line.SHAPES)
    assert all(route == "-" and "GNSILU_ROUTE" in reason for route, reason in rows)


def test_the_cache_shows_its_entries(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    assert _C.write_tuner_entry(path, entry(10)) == ""
    status, output = run("cache")
    assert status == 0
    assert str(path) in output
    assert GPU in output
    assert row_of(output, "three_pass") == [
        "three_pass",
        "10",
        "bfloat16",
        "float16",
        "128 threads, 4 vectors in flight",
        "512.3",
        "132",
        "12.8",
        _C.kernel_version,
        "2026-01-31T12:00:00Z",
        "yes",
    ]


def test_entries_of_other_kernels_are_told_apart(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    assert _C.write_tuner_entry(path, entry(10, kernels="older")) == ""
    cells = row_of(run("cache")[1], "three_pass")
    assert cells[-3] == "older"
    assert cells[-1] == "no"


def test_what_a_file_says_commands_no_terminal(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    assert _C.write_tuner_entry(path, entry(10)) == ""
    path.write_text(path.read_text().replace("2026-01-31", "\\u001b[31m"))
    status, output = run("cache")
    assert status == 0
    assert "\x1b" not in output
    assert "\\x1b[31m" in output


def test_faults_are_shown(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    folder.mkdir()
    path.write_text("[]")
    status, output = run("cache")
    assert status == 0
    assert f"Fault: '{path}' is not a JSON object" in output


def test_clear_removes_our_files_only(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    assert _C.write_tuner_entry(path, entry(10)) == ""
    (folder / "notes.json").write_text("mine")
    status, output = run("cache", "--clear")
    assert status == 0
    assert f"Removed {path}\n" in output
    assert f"Removed {path}.lock\n" in output
    assert [left.name for left in folder.iterdir()] == ["notes.json"]


def test_what_cannot_be_removed_is_said(run, folder):
    path = _C.tuner_file_path(folder, GPU)
    path.mkdir(parents=True)
    (path / "mine").touch()
    status, output = run("cache", "--clear")
    assert status == 1
    assert f"Could not remove: '{path}'" in output
    assert (path / "mine").exists()


def test_case_48_without_a_place_for_the_cache(run, monkeypatch):
    for name in ("GNSILU_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    for arguments in (["cache"], ["cache", "--clear"]):
        status, output = run(*arguments)
        assert status == 0
        assert "No cache folder" in output


def test_info_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, output = run("info")
    assert status == 0
    assert str(gnsilu.build_info()) in output
    assert "No GPU is visible" in output
    assert row_of(output, "(1, 128, 1024, 1024)")[1] == "ring"


@pytest.mark.gpu
def test_info_on_a_gpu(run):
    status, output = run("info")
    assert status == 0
    assert torch.cuda.get_device_name(0) in output
    x = torch.empty(1, 128, 1024, 1024, dtype=torch.bfloat16, device="cuda:0")
    explanation = gnsilu.explain(x, command_line.GROUPS)
    assert row_of(output, "(1, 128, 1024, 1024)") == [
        "(1, 128, 1024, 1024)",
        explanation.route,
        explanation.reason,
    ]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["cache", "--nonsense"], ["info", "x"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m gnsilu" in capsys.readouterr().err


def test_as_a_program(folder):
    shown = subprocess.run(
        [sys.executable, "-m", "gnsilu", "cache"], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert str(folder) in shown.stdout
    wrong = run_python("""
import runpy, sys
sys.argv[1:] = ["nonsense"]
runpy.run_module("gnsilu", run_name="__main__")
""")
    assert wrong.returncode == 2
    assert "usage: python -m gnsilu" in wrong.stderr
