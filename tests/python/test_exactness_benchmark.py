"""benchmarks/exactness.py on the CPU with a very small activation, and the tables made of it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import MIN_SHARE

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SIZE = 8
ELEMENTS = 128 * SIZE * SIZE
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INPUTS = 8
RUNNING = ("fallback", "differentiable", "autocast", "eager_16_bit")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exactness")
    # No compiler: torch.compile takes longer than all the rest, and does not work everywhere.
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8",
        "CXX": str(folder / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    script = str(FOLDER / "exactness.py")
    done = subprocess.run(
        [sys.executable, script, "--device", "cpu", "--size", str(SIZE), "--output", str(folder)],
        capture_output=True, encoding="utf-8", env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


@pytest.fixture
def figures(ran):
    return json.loads((ran[1] / "exactness_cpu.json").read_text("utf-8"))


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_gnsilu_keeps_its_promises_on_every_input(ran, figures):
    rows = figures["exactness"]
    assert len({(row["input"], row["dtype"]) for row in rows}) == len(rows) == 2 * INPUTS
    assert sum(row["ordinary"] for row in rows) == 2 * 3
    for row in rows:
        name = f"{row['input']} {row['dtype']}"
        assert all(row[contender]["elements"] == ELEMENTS for contender in RUNNING), name
        ours = row["fallback"]
        assert ours["max_of_bound"] <= 1 and row["good"], name
        assert ours["mismatched_nonfinite"] == ours["wrong_zero_sign"] == 0, name
        if row["ordinary"]:  # a few may fall to the other side of a tie, however few there are
            allowed = max(4, (1 - MIN_SHARE[TYPES[row["dtype"]]]) * ELEMENTS)
            assert ELEMENTS - ours["correct"] <= allowed, name
    assert "all promises kept" in ran[0]


def test_contenders_are_what_they_say(figures):
    rows = {(row["input"], row["dtype"]): row for row in figures["exactness"]}
    for dtype in TYPES:
        normal = rows["N(0,1)", dtype]
        assert normal["autocast"]["share_correct"] > 0.99
        # Each step rounded to 16 bits.
        assert 0.5 < normal["eager_16_bit"]["share_correct"] < 0.9
        assert normal["differentiable"] == normal["autocast"]
    huge = rows["huge", "bfloat16"]
    assert huge["autocast"]["correct"] == 0 and huge["differentiable"]["correct"] == 0
    assert figures["environment"]["torch"] == torch.__version__


def test_what_cannot_run_here_is_named(ran, figures):
    assert set(figures["missing"]) == {"two_pass", "three_pass", "compiled"}
    assert figures["missing"]["three_pass"] == "needs a CUDA GPU"
    assert "compiler" in figures["missing"]["compiled"]
    assert "torch.compile is not possible here" in ran[0]


def test_histograms_count_every_element_where_it_is(figures):
    assert len(figures["histograms"]) == 4
    units, bins = figures["units"], figures["bins_a_unit"]
    half_unit = slice((2 * units - 1) * bins // 2, (2 * units + 1) * bins // 2)
    errors = {(row["input"], row["dtype"]): row for row in figures["exactness"]}
    for row in figures["histograms"]:
        for contender in RUNNING:
            counts = row["counts"][contender]
            assert len(counts) == 2 * units * bins and sum(counts) == ELEMENTS
            correct = errors[row["input"], row["dtype"]][contender]["correct"]
            # A tie may be rounded either way within half a unit.
            assert 0 <= sum(counts[half_unit]) - correct <= 4, (row["input"], contender)


def test_a_signed_error_falls_into_its_bin(scripts):
    import exactness

    unit = 2.0**-7  # of bfloat16 between 1 and 2
    errors = torch.tensor([0.0, 0.5, -0.5, 0.51, -0.51, 9.0, -9.0], dtype=torch.float64)
    y = torch.full((7,), 1.5, dtype=torch.bfloat16)
    counts = exactness.signed_errors(y, 1.5 - errors * unit)
    first = exactness.UNITS * exactness.BINS_A_UNIT  # the bin from 0 on
    half = exactness.BINS_A_UNIT // 2
    want = {first, first + half - 1, first - half, first + half, first - half - 1}
    want |= {0, 2 * first - 1}
    assert set(counts.nonzero().flatten().tolist()) == want and counts.sum() == 7


def test_fp32_fails_where_gnsilu_does_not(figures):
    assert len(figures["hard"]) == 5 + 3
    for row in figures["hard"]:
        assert row["no_gradient"]["good"], (row["input"], row["dtype"])
    overflow = figures["hard"][0]
    assert math.isnan(overflow["differentiable"]["got"]) and math.isnan(overflow["fp32_x"]["got"])
    tail = next(row for row in figures["hard"] if row["input"].startswith("SiLU's tail"))
    assert tail["differentiable"]["got"] == 0 and -1e-35 < tail["differentiable"]["wanted"] < 0


def test_tables_hold_every_figure(figures, scripts):
    import readme_tables

    short, inputs, hard = (
        block(figures).splitlines() for block in readme_tables.EXACTNESS.blocks.values()
    )
    assert len([line for line in short if line.startswith("| ")]) == 2 + len(RUNNING)
    assert any(line.startswith("Not possible there: the same, `torch.compile`") for line in short)
    assert len([line for line in inputs if line.startswith("| ")]) == 2 + INPUTS * len(RUNNING)
    assert inputs[-1].startswith(f"Elements of each type and x: {ELEMENTS:,}, of 1x128x8x8, ")
    assert len(hard) == 2 + len(figures["hard"])
    for table in (short, inputs, hard):
        assert len({line.count("|") for line in table if line.startswith("| ")}) == 1
    assert any("nan, not" in line for line in hard)


def test_picture_is_saved(ran):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    contents = (ran[1] / "exactness.png").read_bytes()
    assert contents.startswith(b"\x89PNG\r\n\x1a\n") and len(contents) > 20_000
