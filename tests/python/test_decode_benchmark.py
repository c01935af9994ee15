"""benchmarks/decode.py: its table and picture; on a GPU also a small decoder's times."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from gnsilu.timing import Environment, Timing

pytest.importorskip("diffusers")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import decode

    return decode


def small_autoencoder():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def test_models_differ_by_the_patch_alone(decode):
    models = decode.models_of(small_autoencoder().to(torch.bfloat16), "eager")
    assert [type(m.decoder.conv_norm_out).__name__ for m in models.values()] == ["GroupNorm"] * 2
    assert models[False].decoder.conv_norm_out is not models[True].decoder.conv_norm_out
    latent = decode.latent_of(models[True], 32, torch.device("cpu"))
    assert latent.shape == (1, 4, 16, 16) and latent.dtype == torch.bfloat16
    with torch.no_grad():
        plain, patched = (models[which].decode(latent).sample for which in (False, True))
    assert plain.shape == (1, 3, 32, 32) and not torch.equal(plain, patched)
    assert (plain - patched).abs().max() < 0.1 * plain.abs().max()


def test_lines_and_picture(decode, tmp_path):
    pytest.importorskip("matplotlib")
    time = Timing(2000, 1900, 2100, 7)
    results = [
        decode.Result(512, way, patched, time, 512.0)
        for way in decode.WAYS
        for patched in (False, True)
    ]
    results.append(decode.Result(1024, "eager", False, None, None))
    assert str(results[1]).split() == (
        ["512", "eager", "gnsilu", "2.00", "ms", "(1.90-2.10)", "512", "MiB"]
    )
    assert str(results[-1]).endswith("out of memory")
    figures = {
        "environment": asdict(Environment("G", "1", "2", "3", "4", "5")),
        "rows": [asdict(result) for result in results],
    }
    decode.save_picture(figures, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_both_are_measured(decode, way):
    models = decode.models_of(small_autoencoder().to("cuda", torch.bfloat16), way)
    results = decode.measure(models, way, 64)
    assert [(r.size, r.way, r.patched) for r in results] == [(64, way, False), (64, way, True)]
    assert all(r.time is not None and r.time.median > 0 and r.peak_mib > 0 for r in results)
