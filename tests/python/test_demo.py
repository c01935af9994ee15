"""benchmarks/demo.py on the CPU, as `make demo` runs it, with a very small picture."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "benchmarks" / "demo.py"
SIZE = 32
# GroupNorms that a SiLU follows in AutoencoderKL: two in each of 24 residual blocks (10 of the
# encoder, 14 of the decoder), and the last of encoder and decoder.
SITES = 2 * 24 + 2
PNG = b"\x89PNG\r\n\x1a\n"


def run(arguments, **kwargs):
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, encoding="utf-8", env=environment, timeout=600, **kwargs,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    reason = "the demo's own requirements are not installed: pip install diffusers scikit-image"
    for module in ("diffusers", "skimage", "matplotlib"):
        pytest.importorskip(module, reason=reason)
    folder = tmp_path_factory.mktemp("demo")
    done = run([DEMO, "--device", "cpu", "--size", SIZE, "--output", folder])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_table_has_a_row_for_every_site(demo):
    printed, _ = demo
    tables = re.split(r"^b?float16, pairs are gnsilu / PyTorch.*$", printed, flags=re.MULTILINE)
    assert len(tables) == 3
    number = r"\d+(?:\.\d+)?"
    row = re.compile(rf"^ (?:enc|dec) [\w. ]{{14}}(?: +{number} / {number}){{4}} +{number}$")
    for table in tables[1:]:
        rows = [line for line in table.splitlines() if line.startswith((" enc ", " dec "))]
        assert len(rows) == SITES == len({line[:19] for line in rows})
        assert all(row.match(line) and len(line) == 80 for line in rows)
        assert any(line.startswith(" dec up 2.1 norm2 ") for line in rows)
        assert "\n1x128x32x32, 13.1 MB moved, fallback (a)\n enc down 0.0 norm1 " in table
        assert f"\n(a) fallback: x is not on a CUDA device ({SITES} sites)\n" in table
    assert "attention" not in printed  # its GroupNorm feeds no SiLU


def test_end_says_what_to_make_of_it(demo):
    printed, _ = demo
    last = printed.splitlines()[-1]
    assert re.match(
        r"100 sites: largest error 0\.\d\d of what is allowed \(PyTorch 0\.\d\d\), ", last
    )
    assert "On this machine gnsilu is PyTorch's operators (the fallback)" in printed
    assert "counted, not measured" in printed


def test_a_share_that_is_not_finite_stays_in_the_picture(monkeypatch):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.syspath_prepend(str(DEMO.parent))
    import pictures

    _, axes = pictures.plt.subplots()
    shares = [0.5, math.inf, 0.7]
    pictures._plot_shares(axes, shares, marker="o", markersize=5, label="gnsilu")
    pictures._scale_shares(axes, shares)
    finite, others = axes.lines
    assert list(finite.get_ydata()[[0, 2]]) == [0.5, 0.7] and others.get_xdata() == [1]
    assert "not finite" in others.get_label() and axes.get_yscale() == "linear"
    pictures._scale_shares(axes, [0.5, 20.0])
    assert axes.get_yscale() == "log" and axes.get_ylim()[1] > 20
    pictures.plt.close("all")


def test_json_says_what_was_found(demo):
    _, folder = demo
    contents = json.loads((folder / "demo.json").read_text())
    assert contents["picture_size"] == SIZE and contents["environment"]["torch"]
    sites = contents["sites"]
    assert len(sites) == 2 * SITES
    assert len({(s["name"], s["dtype"]) for s in sites}) == 2 * SITES
    for site in sites:
        name = f"{site['name']} {site['dtype']}"
        elements = site["shape"][0] * site["shape"][1] * site["shape"][2] * site["shape"][3]
        assert site["error"]["elements"] == elements, name
        assert site["error"]["max_of_bound"] <= 1, name
        assert site["error"]["mismatched_nonfinite"] == 0, name
        # A few elements may fall to the other side of a tie, however small the activation is.
        limit = max(4, (1e-4 if site["dtype"] == "bfloat16" else 1e-3) * elements)
        assert elements - site["error"]["correct"] <= limit, name
        assert site["route"] == "fallback" and site["reason"], name
        assert site["time"]["median"] > 0 and site["time_pytorch"]["median"] > 0, name
        assert site["megabytes_moved"] > 0, name


def test_activations_are_those_of_the_whole_model(demo):
    _, folder = demo
    sites = json.loads((folder / "demo.json").read_text())["sites"][:SITES]
    shapes = {site["name"]: site["shape"] for site in sites}
    assert shapes["encoder.down_blocks.0.resnets.0.norm1"] == [1, 128, SIZE, SIZE]
    assert shapes["encoder.conv_norm_out"] == [1, 512, SIZE // 8, SIZE // 8]
    assert shapes["decoder.up_blocks.3.resnets.0.norm1"] == [1, 256, SIZE, SIZE]
    assert shapes["decoder.conv_norm_out"] == [1, 128, SIZE, SIZE]


def test_pictures_are_saved(demo):
    _, folder = demo
    for name in ("errors.png", "speed.png"):
        contents = (folder / name).read_bytes()
        assert contents.startswith(PNG) and len(contents) > 20_000, name


@pytest.mark.parametrize(
    ("hidden", "package"), [("diffusers", "diffusers"), ("skimage", "scikit-image")]
)
def test_missing_requirement_is_named_with_the_command(hidden, package, tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.modules[{hidden!r}] = None  # import raises ModuleNotFoundError\n"
        f"sys.argv = [{str(DEMO)!r}, '--output', {str(tmp_path / 'demo')!r}]\n"
        f"runpy.run_path({str(DEMO)!r}, run_name='__main__')\n"
    )
    done = run(["-c", code])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    command = next(line for line in lines if "pip install" in line)
    assert command.startswith("The demo needs ")
    assert f"{sys.executable} -m pip install " in command and package in command
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("size", ["0", "-8", "30"])
def test_a_size_that_the_autoencoder_cannot_take_is_refused(size):
    done = run([DEMO, "--size", size])
    assert done.returncode == 2 and "--size must be a positive multiple of 8" in done.stderr
