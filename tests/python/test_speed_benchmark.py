"""benchmarks/speed.py without a GPU: what it makes of figures, here invented ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SMALLEST, ODD, MIDDLE = (2, 1280, 8, 8), (1, 512, 33, 33), (1, 512, 128, 128)
LARGE, LARGE_GROUPS = (1, 128, 1024, 1024), (1, 128, 2048, 2048)
H200 = {
    "device": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11", "gnsilu": "0.1",
    "date": "2026-12-01",
}  # fmt: skip


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def timing(median, of_copy=None):
    times = {"median": median, "p10": 0.98 * median, "p90": 1.03 * median, "samples": 7}
    return times if of_copy is None else times | {"of_copy": [of_copy, of_copy, of_copy]}


def row(shape, gnsilu=1.0, dtype="bfloat16", compiled=2.5, host=1.0, memory=0):
    """As speed.py writes it: the kernel's copy takes 10 us, the driver's 12, the rest of these."""
    ratios = {"gnsilu": gnsilu, "two_pass": gnsilu + 0.1, "compiled": compiled, "copy_kernel": 1.0}
    ratios |= {"autocast": 20.0, "eager_16_bit": 15.0, "copy": 1.2, "copy_again": 1.206}
    small = 2 * math.prod(shape) < 8 << 20
    return {
        "shape": list(shape), "dtype": dtype, "bytes": 2 * math.prod(shape),
        "group_bytes": 2 * math.prod(shape) // (32 * shape[0]),
        "missing": {"resident": "a group does not fit into shared memory"},
        "cold": {name: timing(10 * ratio, ratio) for name, ratio in ratios.items()},
        "warm": {name: timing(6 * ratio**2, ratio) for name, ratio in ratios.items()},
        "host": {"gnsilu": timing(8 * host), "clone": timing(8.0)} if small else None,
        "memory_bytes": memory, "route": "two_pass", "config": "", "seconds": 1.0,
    }  # fmt: skip


def figures_of(rows):
    return {"kind": "speed", "complete": True, "environment": H200, "rows": rows}


def verdicts_of(rows):
    from targets import judge

    return {verdict.target.title: verdict for verdict in judge(rows)}


# ------------------------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    ("shape", "title", "values"),
    [
        (LARGE, "64 MiB and up, group up to 20 MB", (1.10, 1.11, 1.20, 1.21)),
        ((1, 512, 256, 256), "64 MiB and up, group up to 20 MB", (1.10, 1.11, 1.20, 1.21)),
        ((1, 128, 1536, 1536), "64 MiB and up, group up to 20 MB", (1.10, 1.11, 1.20, 1.21)),
        (LARGE_GROUPS, "64 MiB and up, group beyond that", (1.20, 1.21, 1.35, 1.36)),
        (MIDDLE, "8 to 64 MiB", (1.40, 1.41, 1.90, 1.91)),
        (SMALLEST, "below 8 MiB", (1.50, 1.51, 2.00, 2.01)),
        (ODD, "below 8 MiB, H*W odd", (1.50, 1.51, 2.20, 2.21)),
    ],
)
def test_a_shape_is_judged_by_its_class_against_the_faster_copy(shape, title, values):
    classes = {
        "64 MiB and up, group up to 20 MB", "64 MiB and up, group beyond that", "8 to 64 MiB",
        "below 8 MiB", "below 8 MiB, H*W odd",
    }  # fmt: skip
    for value, word in zip(values, ("goal", "pass", "pass", "FAIL"), strict=True):
        verdicts = verdicts_of([row(shape, value)])
        assert verdicts[title].word == word, value
        assert math.isclose(verdicts[title].worst, value)
        assert {v for v in classes if verdicts[v].shapes} == {title}


def test_the_worst_of_a_class_counts_and_is_named():
    rows = [row(MIDDLE, 1.3), row((1, 1280, 64, 64), 1.95, "float16"), row(MIDDLE, 1.2)]
    verdict = verdicts_of(rows)["8 to 64 MiB"]
    assert verdict.shapes == 3 and verdict.word == "FAIL"
    assert verdict.cells() == ["8 to 64 MiB", "x1.95", "1x1280x64x64 float16", "x1.90", "x1.40",
                               "FAIL"]  # fmt: skip


def test_what_was_not_measured_is_not_passed():
    rows = [row(SMALLEST)]
    del rows[0]["cold"]["compiled"]
    verdicts = verdicts_of(rows)
    for title in ("below 8 MiB, of torch.compile", "8 to 64 MiB, of torch.compile", "8 to 64 MiB"):
        assert verdicts[title].word == "not measured" and verdicts[title].shapes == 0, title
        assert verdicts[title].as_json()["worst"] is None


def test_small_shapes_are_judged_against_pytorch_and_host_and_memory_too():
    good = verdicts_of([row(SMALLEST, 1.5), row(MIDDLE)])
    assert good["below 8 MiB, of torch.compile"].word == "pass"
    assert math.isclose(good["below 8 MiB, of torch.compile"].worst, 1.5 / 2.5)
    assert math.isclose(good["below 8 MiB, of PyTorch, autocast"].worst, 1.5 / 20)
    assert math.isclose(good["below 8 MiB, of PyTorch, 16-bit"].worst, 1.5 / 15)
    assert good["host time of a call, of x.clone()'s"].word == "goal"
    assert good["host time of a call, of x.clone()'s"].shapes == 1
    assert good["memory beyond the result"].word == "goal"
    assert good["memory beyond the result"].shapes == 2
    bad = verdicts_of(
        [row(SMALLEST, 1.5, compiled=1.4, host=1.31), row(LARGE, memory=(1 << 20) + 1)]
    )
    assert bad["below 8 MiB, of torch.compile"].word == "FAIL"
    assert bad["host time of a call, of x.clone()'s"].word == "FAIL"
    assert bad["memory beyond the result"].word == "FAIL"
    assert bad["memory beyond the result"].cells()[1] == "1024.0 KiB"


# ---------------------------------------------------------------------------------- measuring


def test_samples_are_interleaved_and_those_of_slow_ones_fewer():
    from gnsilu.timing import MAX_SAMPLES, MIN_SAMPLES, interleaved, samples_of

    samples = samples_of({"fast": 0.001, "slow": 0.0199, "slowest": 0.5}, 1.2)
    assert samples == {"fast": MAX_SAMPLES, "slow": 20, "slowest": MIN_SAMPLES}
    rounds = interleaved(samples)
    assert {name: sum(name in due for due in rounds) for name in samples} == samples
    slow = [i for i, due in enumerate(rounds) if "slow" in due]
    assert {after - before for before, after in pairwise(slow)} == {3}
    assert interleaved({"a": 3, "b": 3}) == [["a", "b"]] * 3


def test_device_time_is_that_of_a_call_of_each_graph(monkeypatch):
    from gnsilu import timing

    clock = [0.0]  # ms

    def graph(variant, inputs, launches, _):
        def replay():
            clock[0] += launches * variant(inputs[0])

        return SimpleNamespace(replay=replay)

    class Event:
        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

    for name, value in {
        "_event": Event, "_capture": graph,
        "_rough_us": lambda variant, x: 1000 * variant(x), "rotating_inputs": lambda x: [x, x],
    }.items():  # fmt: skip
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    milliseconds = {"fast": 0.01, "slow": 3.0, "slowest": 500.0}
    variants = {name: lambda _, ms=ms: ms for name, ms in milliseconds.items()}
    times = timing.device_times(variants, torch.zeros(1), budget_s=0.3)
    for name, ms in milliseconds.items():
        assert times[name].median == pytest.approx(1000 * ms), name
    # Replays of 40, 2 and 2 calls share the budget.
    assert [t.samples for t in times.values()] == [60, 16, 7]


@pytest.mark.parametrize("shape", [(1, 3, 33, 33), (2, 1280, 8, 8), (1, 2, 3, 4, 5)])
def test_the_kernel_copies_every_bit_of_any_size(shape):
    from gnsilu.timing import copy_kernel

    x = torch.randn(shape).bfloat16()
    y = copy_kernel(x)
    assert y.nbytes == x.nbytes
    assert torch.equal(~y.view(torch.int16), x.view(-1).view(torch.int16))


def test_contenders_compute_the_same():
    import contenders
    from contenders import Case
    from gnsilu import bench

    x = torch.randn(1, 64, 9, 9).bfloat16()
    case = Case.of(x)
    want = case.bound(contenders.autocast)(x).float()
    for contender in (contenders.default, contenders.through("fallback"), bench.eager_16_bit):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.allclose(case.bound(contender, dtype)(x).float(), want, 0.1, 0.1)
    assert "GNSILU_ROUTE" not in os.environ


def test_a_route_that_cannot_serve_is_left_out_with_its_reason():
    from contenders import Case, why_not_through

    case = Case.of(torch.randn(1, 64, 8, 8).bfloat16())
    arguments = (case.x, case.weight, case.bias)
    for route in ("ring", "resident", "two_pass", "three_pass"):
        assert why_not_through(route, *arguments) == "x is not on a CUDA device"
    assert why_not_through("fallback", *arguments) is None
    with pytest.raises(RuntimeError, match="GNSILU_ROUTE"):
        why_not_through("no_such_route", *arguments)


def test_shapes_are_those_that_speed_is_judged_at():
    import speed
    from contenders import bytes_of, group_bytes_of

    todo = speed.work("all", speed.FULL)
    assert len(todo) == len(set(todo)) == 11 + 8 + 5
    assert {dtype for _, dtype in todo} == {torch.bfloat16, torch.float16}
    small = speed.work("small", speed.QUICK)
    assert small == [item for item in todo if bytes_of(item[0]) < 64 << 20][: len(small)]
    assert {dtype for _, dtype in small} == {torch.bfloat16}
    # Every class has a shape.
    assert group_bytes_of(LARGE_GROUPS) == 33554432 and bytes_of((1, 512, 256, 256)) == 64 << 20
    assert (LARGE_GROUPS, torch.bfloat16) in todo and (ODD, torch.bfloat16) in small


# ---------------------------------------------------------------------------- a run on no GPU


@pytest.fixture
def invented_gpu(monkeypatch):
    """speed.main() on the CPU: the shapes are small, and what a GPU says is invented."""
    import speed
    from gnsilu.timing import Environment, Timing

    def times(variants, x, *_, **__):
        return {name: Timing(2.0 + i, 1.9 + i, 2.2 + i, 7) for i, name in enumerate(variants)}

    measured = []

    def work(*_):
        return [(shape, torch.bfloat16) for shape in (SMALLEST, ODD, (1, 64, 9, 9))]

    def draw(shape, dtype, device):
        measured.append(shape)
        if shape == ODD:
            raise torch.OutOfMemoryError("invented")
        return torch.randn(shape).to(dtype)

    stats = iter([{"requested_bytes.all.current": 100}, {"requested_bytes.all.peak": 400000}] * 3)
    properties = SimpleNamespace(L2_cache_size=60 << 20)
    for name, value in {
        "is_available": lambda: True, "synchronize": lambda: None, "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None, "memory_stats": lambda: next(stats),
        "get_device_properties": lambda _: properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "normal": draw, "device_times": times, "host_times": times, "work": work,
        "environment": lambda _: Environment(**H200), "compile_afresh": lambda: speed.autocast,
    }.items():  # fmt: skip
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setenv("GNSILU_ROUTE", "three_pass")  # is not what a call takes by itself
    return measured


def test_a_run_saves_after_each_shape_and_ends_with_the_targets(
    invented_gpu, monkeypatch, tmp_path, capsys
):
    import speed

    monkeypatch.setattr(sys, "argv", ["speed.py", "--output", str(tmp_path)])
    saved = []
    whole = speed.save

    def save(figures, path):
        whole(figures, path)
        saved.append(json.loads(path.read_text("utf-8")))

    monkeypatch.setattr(speed, "save", save)
    assert speed.main() == 0
    assert invented_gpu == [SMALLEST, ODD, (1, 64, 9, 9)]
    assert [(len(f["rows"]), len(f["left_out"]), f["complete"]) for f in saved] == [
        (1, 0, False), (1, 1, False), (2, 1, False), (2, 1, True),
    ]  # fmt: skip
    figures = json.loads((tmp_path / "speed_h200.json").read_text("utf-8"))
    assert figures == saved[-1] and figures["environment"] == H200
    first = figures["rows"][0]
    assert first["route"] == "fallback" and set(first["missing"]) == {
        "ring", "resident", "two_pass", "three_pass"
    }  # fmt: skip
    contenders = ["copy", "copy_kernel", "gnsilu", "fallback", "copy_again", "compiled",
                  "autocast", "eager_16_bit"]  # fmt: skip
    assert list(first["cold"]) == list(first["warm"]) == contenders
    assert first["cold"]["gnsilu"]["of_copy"] == [2.0, 1.95, 2.1]  # 4.0, 3.9, 4.2 over 2.0
    assert list(first["host"])[:3] == ["clone", "gnsilu", "clone_again"]
    assert first["memory_bytes"] == 400000 - 100 - first["bytes"]
    printed = capsys.readouterr().out
    assert "2x1280x8x8" in printed and "1x512x33x33, torch.bfloat16: out of memory" in printed
    assert "Against the targets" in printed and "FAIL" in printed and "not measured" in printed
    assert [t["verdict"] for t in figures["targets"]].count("FAIL") >= 1


def test_without_a_gpu_it_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(FOLDER / "speed.py"), "--output", str(tmp_path / "new")],
        capture_output=True, encoding="utf-8", timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1 and not (tmp_path / "new").exists()
    assert done.stderr.strip() == "speed.py measures a GPU and finds none."


# -------------------------------------------------------------------------- pictures and table


def test_pictures_are_saved(tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    import speed_pictures

    rows = [row(shape, 1.5) for shape in (LARGE, SMALLEST, MIDDLE, (4, 512, 64, 64))]
    rows.append(row(MIDDLE, 1.4, "float16"))
    del rows[0]["cold"]["two_pass"]
    for draw in (speed_pictures.save_ratios, speed_pictures.save_bandwidth):
        path = tmp_path / f"{draw.__name__}.png"
        draw(figures_of(rows), path)
        contents = path.read_bytes()
        assert contents.startswith(b"\x89PNG\r\n\x1a\n") and len(contents) > 20_000


def test_a_line_goes_through_the_middle_of_shapes_of_one_size():
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    from speed_pictures import line, terabytes_a_second

    sizes, values = line([(16.0, 4.0), (2.0, 3.0), (16.0, 1.0)])
    assert sizes == [2.0, 16.0] and values == pytest.approx([3.0, 2.0])
    # 4 bytes an element: 1.05e6 elements in 1 us.
    assert terabytes_a_second(row((1, 1024, 32, 32)), 1.0) == pytest.approx(4.194304)


def test_readme_table_is_filled_from_the_figures(monkeypatch, tmp_path):
    import readme_tables

    figures = figures_of([row(LARGE, 1.234), row(LARGE, 9.0, "float16"), row(SMALLEST)])
    del figures["rows"][2]["cold"]["compiled"]
    (document,) = readme_tables.documents_of(figures)
    assert document is readme_tables.SPEED
    text = "before\n<!-- speed -->\nold\n<!-- end -->\nafter <!-- exactness -->x<!-- end -->"
    filled = document.filled(text, figures, "speed_h200.json")
    assert filled.startswith("before\n<!-- speed -->\n| x (N,C,H,W) | copy | route | gnsilu |")
    assert filled.endswith("<!-- end -->\nafter <!-- exactness -->x<!-- end -->")
    assert "| 1x128x1024x1024 | 10.0 us | `two_pass` | x1.23 | x2.50 | x20.00 | x15.00 |" in filled
    assert "| 2x1280x8x8 | 10.0 us | `two_pass` | x1.00 | - | x20.00 | x15.00 |" in filled
    assert "x9.00" not in filled
    assert "`benchmarks/speed.py`: [speed_h200.json](benchmarks/results/speed_h200.json)" in filled
    # --check sees it, and sees a digit that was changed.
    (tmp_path / "speed_h200.json").write_text(json.dumps(figures))
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    block = filled[len("before\n") : filled.index("<!-- end -->")]
    path = readme_tables.README
    assert readme_tables.is_current(path, "speed", block)
    assert not readme_tables.is_current(path, "speed", block.replace("x1.23", "x1.22"))
    assert not readme_tables.is_current(path, "exactness", block)
    assert not readme_tables.is_current(readme_tables.EXACTNESS.path, "speed", block)


def test_environment_names_the_file():
    from gnsilu.timing import Environment

    assert Environment(**H200).short_device == "h200"
    assert Environment(**{**H200, "device": "NVIDIA GeForce RTX 4090"}).short_device == (
        "geforce_rtx_4090"
    )
    assert Environment(**{**H200, "device": "a processor", "driver": ""}).short_device == "cpu"
    assert set(asdict(Environment(**H200))) == set(H200)
