"""benchmarks/demo.py on the CPU, as `make demo` runs it, with a very small picture."""

import json
import os
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
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
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
    rows = [line for line in printed.splitlines() if " encoder." in line or " decoder." in line]
    for dtype in ("bfloat16", "float16"):
        of_type = [line for line in rows if f" {dtype} " in line]
        assert len(of_type) == SITES
        assert all("fallback (1)" in line for line in of_type)
    assert "attention" not in printed  # its GroupNorm feeds no SiLU
    assert "(1) fallback, 100 sites: " in printed  # and the reason
    assert f"{2 * SITES} sites: largest error" in printed.splitlines()[-1]


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
        # The fallback is PyTorch's own arithmetic: where that is outside, gnsilu is not further.
        allowed = max(1, site["error_pytorch"]["max_of_bound"])
        assert site["error"]["max_of_bound"] <= allowed, name
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
