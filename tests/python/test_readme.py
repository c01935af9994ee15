"""What the README shows runs, and its figures are those that were measured."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import setup_env
import torch
from gnsilu import bench, command_line

README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.S)
    assert all("cuda" in block for block in blocks)
    if not torch.cuda.is_available():
        blocks = [block.replace("cuda", "cpu") for block in blocks]
    return blocks


def test_python_examples_run(capsys):
    use, patch = python_blocks()
    names: dict[str, object] = {}
    exec(use, names)
    assert isinstance(names["y"], torch.Tensor) and names["y"].dtype == torch.float16

    diffusers = pytest.importorskip("diffusers")
    make = "diffusers.AutoencoderKL.from_pretrained(...)"
    assert make in patch
    small = diffusers.AutoencoderKL(norm_num_groups=4, block_out_channels=(8,), sample_size=16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    latents = torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16, device=device)
    names |= {"small": small, "latents": latents}
    exec(patch.replace(make, "small"), names)
    assert "GroupNorms fused" in capsys.readouterr().out
    assert names["image"].shape == (1, 3, 8, 8)


def shell_commands() -> list[str]:
    """Of the indented blocks, and of the pip commands within a line; comments left out."""
    text = README.read_text("utf-8")
    lines = re.findall(r"^    ((?:make|pip|python) .*)$", text, flags=re.M)
    return [line.split(" #")[0].strip() for line in lines] + re.findall(r"`(pip [^`]*)`", text)


def test_shell_commands_are_those_that_work(monkeypatch, tmp_path):
    """The commands of the package run, the goals of make exist; pip gets what the build needs."""
    monkeypatch.setenv("GNSILU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bench, "SHAPES", bench.SHAPES[:1])
    monkeypatch.setattr(bench, "CPU_SHAPES", bench.SHAPES[:1])
    build = re.search(r"requires = \[(.*)\]", (README.parent / "pyproject.toml").read_text("utf-8"))
    assert build is not None
    needed = {word for word in re.findall(r'"([^"]+)"', build[1]) if word != "torch"}
    seen = []
    for command in shell_commands():
        program, *arguments = shlex.split(command)
        seen.append(program)
        if program == "python":
            assert arguments[:2] == ["-m", "gnsilu"]
            assert command_line.main(arguments[2:]) == 0
        elif program == "make":
            goals = subprocess.run(["make", "-n", *arguments], cwd=README.parent)
            assert goals.returncode == 0
        elif arguments == ["install", "--no-build-isolation", "."]:
            continue  # make test installs by it
        elif "setuptools" in command:
            assert needed <= set(arguments)
        else:
            assert arguments == ["install", *setup_env.nvcc_wheels("13.0")]
    assert {program: seen.count(program) for program in seen} == {"pip": 3, "make": 2, "python": 5}


def test_tables_are_those_of_the_figures_that_they_name(monkeypatch):
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    import readme_tables

    assert readme_tables.stale() == []


def test_environment_variables_are_those_that_are_read():
    root = README.parent
    sources = [*root.glob("csrc/**/*.cpp"), *root.glob("python/gnsilu/*.py")]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    named = set(re.findall(r"`(GNSILU_[A-Z_]+)`", README.read_text("utf-8")))
    read = set(re.findall(r'(?:getenv|environ\w*)\W+"(GNSILU_[A-Z_]+)"', text))
    assert named == {"GNSILU_ROUTE", "GNSILU_TUNE", "GNSILU_CACHE_DIR"}
    assert read <= named
