"""`python -m gnsilu bench`, on few and small shapes."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from gnsilu import bench, command_line
from gnsilu.timing import Timing

SHAPES = ((2, 64, 8, 8), (1, 96, 32, 32))


def timing(median: float) -> Timing:
    return Timing(median, median, median, 7)


@pytest.fixture
def row():
    times = {"gnsilu": timing(15), "autocast": timing(300), "eager_16_bit": timing(250)}
    return bench.Row((1, 64, 100, 100), "ring", timing(10), times)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", SHAPES)
    monkeypatch.setattr(bench, "CPU_SHAPES", SHAPES)


def test_figures_of_a_row(row):
    assert row.megabytes == 1.28
    assert (row.of_copy("gnsilu"), row.of_copy("eager_16_bit"), row.speedup) == (1.5, 25, 20)


def test_rows_are_measured_by_the_route_of_the_call(device):
    for found, shape in zip(bench.measured(device, torch.float16, False), SHAPES, strict=True):
        x = torch.zeros(shape, dtype=torch.float16, device=device)
        assert (found.shape, found.route) == (shape, gnsilu.explain(x, bench.GROUPS).route)
        assert list(found.times) == ["gnsilu", "autocast", "eager_16_bit"]
        assert all(t.median > 0 for t in (found.copy, *found.times.values()))


def test_the_command_prints_a_table_and_draws_a_picture(capsys, tmp_path, device):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    arguments = ["bench", "--device", str(device), "--dtype", "float16", "--picture", str(picture)]
    assert command_line.main(arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith(torch.cuda.get_device_name() if device.type == "cuda" else "")
    assert "float16, 32 groups" in output and "faster than autocast" in output
    assert all(output.count(str(shape)) == 2 for shape in SHAPES)  # while it runs, and the table
    assert f"Saved {picture}" in output and picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_gives_multiples_of_the_copy(monkeypatch, capsys, row):
    monkeypatch.setattr(command_line, "measured", lambda *_: iter([row, "(9,): too large"]))
    assert command_line.main(["bench", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    cells = [cell.strip() for cell in output.splitlines()[-2].strip("│").split("│")]
    assert cells == ["(1, 64, 100, 100)", "ring", "10.0", "x1.50", "x30.00", "x25.00", "x20.0"]
    assert "(9,): too large" in output


def test_a_shape_without_memory_is_named(monkeypatch):
    def measure(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(bench, "_measure", measure)
    found = list(bench.measured(torch.device("cpu"), torch.bfloat16, False))
    assert found == [f"{shape}: not enough free memory" for shape in SHAPES]


def test_contenders_compute_the_same(device):
    x = torch.randn(1, 32, 8, 8, device=device).to(torch.bfloat16)
    weight, bias = torch.randn(2, 32, device=device)
    wanted = gnsilu.group_norm_silu(x, bench.GROUPS, weight, bias, bench.EPS)
    torch.testing.assert_close(bench.autocast(x, weight, bias), wanted)
    torch.testing.assert_close(bench.eager_16_bit(x, weight, bias), wanted, rtol=0.1, atol=0.05)


def test_a_route_that_cannot_serve_is_named(monkeypatch, capsys):
    monkeypatch.setenv("GNSILU_ROUTE", "resident")
    assert command_line.main(["bench", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.count("route resident is not possible") == len(SHAPES)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--device", "foo", "Expected one of cpu, cuda"),
        ("--device", "cuda:77", ""),
        ("--device", "meta", ""),
        ("--picture", "bench.xyz", "FILE.png is wanted"),
        ("--picture", "", "FILE.png is wanted"),
        ("--picture", "/nonexistent/bench.png", "/nonexistent is no folder"),
    ],
)
def test_bad_arguments_are_found_before_anything_is_measured(option, value, words, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["bench", option, value])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: " in error and words in error


def test_no_picture_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    assert (
        bench.why_no_picture(tmp_path / "a.png") == "matplotlib is missing: pip install matplotlib"
    )
