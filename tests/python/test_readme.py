"""What the README shows runs, and its figures are those that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.S)
    assert code.count("cuda") >= 2
    if not torch.cuda.is_available():
        code = code.replace("cuda", "cpu")
    names: dict[str, object] = {}
    exec(code, names)
    assert isinstance(names["y"], torch.Tensor) and names["y"].dtype == torch.float16


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
