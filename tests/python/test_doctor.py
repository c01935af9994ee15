"""`python -m gnsilu doctor`: what it finds on invented machines."""

from __future__ import annotations

import dataclasses

import gnsilu
import pytest
import setup_env
import torch
from gnsilu import command_line, doctor


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """None but a cache folder that can be written."""
    for name in ("GNSILU_ROUTE", "GNSILU_TUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GNSILU_CACHE_DIR", str(tmp_path / "cache"))


def found(words: str) -> doctor.Finding:
    """The one finding that says so."""
    (finding,) = [finding for finding in doctor.examine() if words in finding.what]
    return finding


@pytest.fixture
def invented_gpu(monkeypatch):
    """A GPU of this capability, on which calls are not made."""

    def invent(*capability):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Invented")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        call = doctor._call

        def on_cpu_only(device, dtype):
            works = doctor.Finding("works", f"{device} {dtype}")
            return call(device, dtype) if device.type == "cpu" else works

        monkeypatch.setattr(doctor, "_call", on_cpu_only)

    return invent


def build_for(monkeypatch, cuda, *architectures):
    facts = dataclasses.replace(gnsilu.build_info(), cuda=cuda, architectures=architectures)
    monkeypatch.setattr(doctor, "build_info", lambda: facts)


def test_nothing_is_broken_here(device, capsys):
    findings = list(doctor.examine())
    assert not [finding for finding in findings if finding.state == "broken"]
    assert found("A call on cpu gives the FP64 result, by the route fallback").state == "works"
    if device.type == "cuda":
        by_kernels = [f for f in findings if "A call on cuda:0 gives the FP64 result" in f.what]
        assert len(by_kernels) == 2 and all("fallback" not in f.what for f in by_kernels)
    assert command_line.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert all(finding.what in output and finding.mend in output for finding in findings)


@pytest.mark.parametrize(
    ("route", "state"), [("fallback", "limited"), ("fastest", "broken"), ("three_pass", "limited")]
)
def test_a_forced_route(monkeypatch, route, state):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    finding = found(f"GNSILU_ROUTE={route!r}" if state == "broken" else f"GNSILU_ROUTE={route}")
    assert (finding.state, finding.mend) == (state, "unset GNSILU_ROUTE")


def test_a_call_that_fails_or_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "group_norm_silu", lambda x, *_: x)
    finding = found("A call on cpu gives wrong values, by the route fallback")
    assert finding.state == "broken" and "GNSILU_ROUTE=fallback" in finding.mend
    assert command_line.main(["doctor"]) == 1
    assert "broken   A call on cpu gives wrong values" in capsys.readouterr().out

    def fail(*_):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(doctor, "group_norm_silu", fail)
    assert found("A call on cpu fails: no such thing").state == "broken"


def test_no_tuning(monkeypatch):
    assert not [finding for finding in doctor.examine() if "GNSILU_TUNE" in finding.what]
    monkeypatch.setenv("GNSILU_TUNE", "0")
    assert found("GNSILU_TUNE=0").mend == "unset GNSILU_TUNE"


@pytest.mark.parametrize(
    ("cuda", "mend"), [("13.0", '"nvidia-nvvm==13.0.*"'), ("12.8", "install CUDA toolkit 12.8")]
)
def test_a_build_without_kernels(monkeypatch, cuda, mend):
    build_for(monkeypatch, "")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = found("built without CUDA kernels")
    assert finding.state == "limited" and mend in finding.mend and doctor.REBUILD in finding.mend
    if cuda == "13.0":  # as make would
        assert all(f'"{wheel}"' in finding.mend for wheel in setup_env.nvcc_wheels(cuda))


@pytest.mark.parametrize(
    ("capability", "what", "mend"),
    [
        ((7, 0), "is older than compute capability 7.5", ""),
        ((8, 0), "no machine code for sm_80", "GNSILU_CUDA_ARCHITECTURES=80"),
        ((12, 1), None, ""),  # that of 12.0 runs there
        ((9, 0), None, ""),
    ],
)
def test_gpus_that_the_build_serves_and_others(monkeypatch, invented_gpu, capability, what, mend):
    build_for(monkeypatch, "13.0", "sm_86", "sm_90", "sm_120", "compute_120")
    invented_gpu(*capability)
    findings = [finding for finding in doctor.examine() if "Invented" in finding.what]
    assert [what in finding.what for finding in findings] == ([True] if what else [])
    assert all(f.state == "limited" and f.mend.startswith(mend) for f in findings)
    assert found("cuda:0 torch.float16").state == "works"


def test_a_driver_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_why_no_cuda", lambda: "the driver is too old")
    finding = found("torch sees no GPU: the driver is too old")
    assert (finding.state, finding.mend) == ("broken", "nvidia-smi")


def test_a_gpu_in_a_bad_state(monkeypatch, invented_gpu):
    def fail(_):
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    invented_gpu(9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    finding = found("cuda:0 cannot be used: CUDA error: unspecified launch failure")
    assert finding.state == "broken" and found("The tuner keeps its results in")


def test_folders_that_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    for name, words in (
        ("dangling", f"{tmp_path / 'dangling'} is no folder"),
        ("loop", f"{tmp_path / 'loop'} is no folder"),
        ("file/cache", f"{tmp_path / 'file'} is no folder"),
        ("a" * 300, "File name too long"),
    ):
        assert doctor.cache_fault(tmp_path / name) == words
        monkeypatch.setenv("GNSILU_CACHE_DIR", str(tmp_path / name))
        assert found("The tuner cannot write to").state == "limited"
    assert doctor.cache_fault(tmp_path / "new" / "cache") is None

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.Path, "lstat", refuse)
    assert doctor.cache_fault(tmp_path) == "Permission denied"


def test_where_the_tuner_cannot_write(monkeypatch):
    monkeypatch.setenv("GNSILU_CACHE_DIR", "/proc/gnsilu")
    finding = found("The tuner cannot write to /proc/gnsilu")
    assert finding.state == "limited" and finding.mend.startswith("export GNSILU_CACHE_DIR=")


def test_a_damaged_tuner_file(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    assert found(f"The tuner keeps its results in {folder}").state == "works"
    path = gnsilu._C.tuner_file_path(folder, "Invented")
    path.write_text("[]")
    finding = found(f"A file of the tuner is ignored: '{path}' is not a JSON object")
    assert finding.state == "limited" and finding.mend == "python -m gnsilu cache --clear"
