"""gnsilu.patch on the image and video models of diffusers, tiny and with random weights."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import gnsilu
import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="not installed: pip install diffusers")

RESNET_SITE = "`self.nonlinearity(hidden_states)` follows"
ATTENTION = "Attention.forward does not call it"
TRANSFORMER = "Transformer2DModel.forward does not call it"

IMAGE_SITES = (
    "encoder.down_blocks.0.resnets.0.norm1",
    "encoder.down_blocks.0.resnets.0.norm2",
    "encoder.down_blocks.1.resnets.0.norm1",
    "encoder.down_blocks.1.resnets.0.norm2",
    "encoder.mid_block.resnets.0.norm1",
    "encoder.mid_block.resnets.0.norm2",
    "encoder.mid_block.resnets.1.norm1",
    "encoder.mid_block.resnets.1.norm2",
    "encoder.conv_norm_out",
    "decoder.up_blocks.0.resnets.0.norm1",
    "decoder.up_blocks.0.resnets.0.norm2",
    "decoder.up_blocks.0.resnets.1.norm1",
    "decoder.up_blocks.0.resnets.1.norm2",
    "decoder.up_blocks.1.resnets.0.norm1",
    "decoder.up_blocks.1.resnets.0.norm2",
    "decoder.up_blocks.1.resnets.1.norm1",
    "decoder.up_blocks.1.resnets.1.norm2",
    "decoder.mid_block.resnets.0.norm1",
    "decoder.mid_block.resnets.0.norm2",
    "decoder.mid_block.resnets.1.norm1",
    "decoder.mid_block.resnets.1.norm2",
    "decoder.conv_norm_out",
)


def seeded(make, *arguments, **settings):
    """A model whose norms and biases have random values, too."""
    torch.manual_seed(3)
    model = make(*arguments, **settings).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.3)
    return model


def image_autoencoder():
    return seeded(
        diffusers.AutoencoderKL,
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def temporal_decoder():
    return seeded(
        diffusers.AutoencoderKLTemporalDecoder,
        block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
    )  # fmt: skip


def video_settings(block, last):
    return {
        "block_out_channels": (8, 8, 8, last), "norm_num_groups": 4, "layers_per_block": 1,
        "latent_channels": 4, "down_block_types": (block.format("Down"),) * 4,
        "up_block_types": (block.format("Up"),) * 4,
    }  # fmt: skip


def hunyuan_video():
    settings = video_settings("HunyuanVideo{}Block3D", 8)
    return seeded(diffusers.AutoencoderKLHunyuanVideo, **settings)


def allegro():
    settings = video_settings("Allegro{}Block3D", 16)
    return seeded(diffusers.AutoencoderKLAllegro, **settings)


def cogvideox():
    settings = video_settings("CogVideoX{}Block3D", 16)
    return seeded(diffusers.AutoencoderKLCogVideoX, **settings)


def unet(**settings):
    return seeded(
        diffusers.UNet2DConditionModel,
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **settings,
    )  # fmt: skip


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(model, dtype=torch.float32, samples=1, seed=5):
    """The output for random input."""
    if isinstance(model, diffusers.UNet2DConditionModel):
        states = noise(samples, 5, 8, seed=seed).to(dtype)
        x = noise(samples, 4, 16, 16, seed=seed).to(dtype)
        return model(x, torch.tensor(3), states).sample
    if isinstance(model, diffusers.AutoencoderKL):
        return model(noise(samples, 3, 32, 32, seed=seed).to(dtype)).sample
    if isinstance(model, diffusers.AutoencoderKLTemporalDecoder):
        return model(noise(4, 3, 16, 16, seed=seed).to(dtype), num_frames=2).sample
    if isinstance(model, diffusers.AutoencoderKLAllegro):  # encodes in tiles only
        return model.decoder(noise(1, 4, 1, 4, 4, seed=seed).to(dtype))
    latents = model.encode(noise(1, 3, 5, 32, 32, seed=seed).to(dtype)).latent_dist.mode()
    return model.decode(latents).sample


MODELS = [image_autoencoder, temporal_decoder, hunyuan_video, allegro, cogvideox, unet]


def test_every_site_of_the_image_autoencoder_is_named():
    report = gnsilu.patch(image_autoencoder())
    assert report.fused == IMAGE_SITES
    assert report.not_fused == tuple(
        f"{part}.mid_block.attentions.0.group_norm" for part in ("encoder", "decoder")
    )
    reasons = {site.name: site.reason for site in report.sites}
    assert {reasons[name] for name in report.not_fused} == {ATTENTION}
    assert reasons["encoder.conv_norm_out"] == "`self.conv_act(sample)` follows"
    assert reasons["decoder.mid_block.resnets.1.norm2"] == RESNET_SITE


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (
            temporal_decoder,
            {RESNET_SITE: 28, "`self.conv_act(sample)` follows": 2, ATTENTION: 2},
        ),
        (
            hunyuan_video,
            {RESNET_SITE: 32, "`self.conv_act(hidden_states)` follows": 2, ATTENTION: 2},
        ),
        (
            allegro,
            {
                RESNET_SITE: 32,
                "`self[1](input)` follows": 80,
                "`self.conv_act(sample)` follows": 2,
                ATTENTION: 2,
            },
        ),
        (
            cogvideox,
            {
                RESNET_SITE: 12,
                "`self.conv_act(hidden_states)` follows": 1,
                "its result is used in `norm_f * conv_y`": 21,
            },
        ),
        (
            unet,
            {RESNET_SITE: 16, "`self.conv_act(sample)` follows": 1, TRANSFORMER: 4},
        ),
    ],
)
def test_every_group_norm_has_a_reason(make, reasons):
    model = make()
    report = gnsilu.patch(model)
    assert Counter(site.reason for site in report.sites) == reasons
    assert all(site.fused == site.reason.endswith(" follows") for site in report.sites)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)]
    assert [site.name for site in report.sites] == names


def test_figures_of_the_readme():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    blocks = {
        "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
    }  # fmt: skip
    with torch.device("meta"):
        models = [
            diffusers.AutoencoderKL(up_block_types=("UpDecoderBlock2D",) * 4, **blocks),
            diffusers.AutoencoderKLTemporalDecoder(**blocks),
            diffusers.AutoencoderKLHunyuanVideo(),
            diffusers.UNet2DConditionModel(),
        ]
    for model in models:
        report = gnsilu.patch(model)
        row = f"| `{type(model).__name__}` | {len(report.fused)} | {len(report.sites)} |"
        assert row in readme, row
        assert {site.reason for site in report.sites if not site.fused} <= {ATTENTION, TRANSFORMER}


def test_scale_and_shift_are_decided_for_each_block():
    both = nn.ModuleList([unet(), unet(resnet_time_scale_shift="scale_shift")])
    wanted = run(both[1])
    report = gnsilu.patch(both)
    reasons = {site.name: site.reason for site in report.sites}
    assert reasons["0.mid_block.resnets.0.norm2"] == RESNET_SITE
    between = "its result is used in `hidden_states * (1 + time_scale)`"
    assert reasons["1.mid_block.resnets.0.norm2"] == between
    assert reasons["1.mid_block.resnets.0.norm1"] == RESNET_SITE
    assert Counter(reasons.values())[between] == 8 and len(report.fused) == 17 + 9
    torch.testing.assert_close(run(both[1]), wanted, rtol=1e-4, atol=1e-5)


def test_spatial_norms_and_layouts_between_are_left_alone():
    from diffusers.models.autoencoders.autoencoder_kl_magvit import EasyAnimateResidualBlock3D
    from diffusers.models.autoencoders.vae import Decoder

    spatial = Decoder(in_channels=4, block_out_channels=(32,), norm_type="spatial")
    report = gnsilu.patch(spatial)
    norms = {site.reason for site in report.sites if site.name.endswith(".norm_layer")}
    assert report.fused == () and len(norms) == 1 and "norm_f * self.conv_y(zq)" in norms.pop()
    x = noise(1, 8, 3, 4, 4)
    for spatial_group_norm, fused in ((True, ()), (False, ("norm1", "norm2"))):
        settings = {"norm_num_groups": 2, "spatial_group_norm": spatial_group_norm}
        model = seeded(EasyAnimateResidualBlock3D, 8, 8, **settings)
        wanted = copy.deepcopy(model)(x)  # each call leaves something for the next one
        assert gnsilu.patch(model).fused == fused
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_unpatching_restores_everything(make):
    model = make()
    with torch.no_grad():
        before = run(model)
        things = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
        parameters = {name: id(p) for name, p in model.named_parameters()}
        assert gnsilu.patch(model) == gnsilu.patch(model)
        assert {n: dict(m.__dict__) for n, m in model.named_modules()} == {
            name: attributes for name, (_, attributes) in things.items()
        }
        assert type(model).__name__ == make().__class__.__name__
        torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)
        gnsilu.unpatch(model)
        assert torch.equal(run(model), before)
    assert things == {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    assert parameters == {name: id(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (image_autoencoder, torch.float16),
        *((make, torch.bfloat16) for make in MODELS if make is not allegro),
    ],
)
def test_16_bit_outputs_are_no_further_from_fp32(make, dtype):
    """The convolutions round as much in both, but not the same: one input may come out either way,
    many together tell."""
    model = make()

    def outputs(dtype):
        with torch.no_grad():
            return torch.stack([fused_part(model, dtype, seed).float() for seed in range(6)])

    exact = outputs(torch.float32)
    model.to(dtype)
    plain = (outputs(dtype) - exact).abs()
    gnsilu.patch(model)
    patched = (outputs(dtype) - exact).abs()
    assert 0 < plain.mean() < 0.1 * exact.abs().mean()
    assert patched.mean() <= 1.02 * plain.mean()
    # One in a thousand is larger: the largest of all is a matter of luck.
    assert large(patched) <= 1.05 * large(plain)


def large(errors):
    return errors.flatten().kthvalue(errors.numel() * 999 // 1000).values


def fused_part(model, dtype, seed):
    """The output of as much of the model as patch() changes."""
    if isinstance(model, diffusers.AutoencoderKLCogVideoX):  # the decoder's norms are spatial
        x = noise(2, 3, 5, 32, 32, seed=seed).to(dtype)
        return model.encode(x).latent_dist.mode()
    return run(model, dtype, samples=2, seed=seed)


def test_autocast():
    model = image_autoencoder()
    with torch.no_grad():
        exact = run(model)
        errors = []
        for patched in (False, True):
            gnsilu.patch(model) if patched else None
            with torch.autocast("cpu", torch.bfloat16):
                y = run(model)
            assert y.dtype == torch.bfloat16
            errors.append((y.float() - exact).abs().mean())
    assert 0 < errors[1] <= 1.02 * errors[0]


def test_tiling_and_slicing():
    model = image_autoencoder()
    latents = noise(2, 4, 40, 40)

    def outputs():
        with torch.no_grad():
            whole = model.decode(latents).sample
            model.enable_slicing()
            model.enable_tiling()
            tiled = model.decode(latents).sample
            model.disable_slicing()
            model.disable_tiling()
            return whole, tiled

    wanted = outputs()
    gnsilu.patch(model)
    found = outputs()
    assert not torch.equal(*wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(checkpointing):
    model = unet().train()
    patched = copy.deepcopy(model)
    assert len(gnsilu.patch(patched).fused) == 17
    if checkpointing:
        patched.enable_gradient_checkpointing()
    for m in (model, patched):
        run(m).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_decoder_and_compiled_blocks():
    model = image_autoencoder()
    latents = noise(1, 4, 8, 8)
    with torch.no_grad():
        wanted = model.decoder(latents)
        gnsilu.patch(model)
        traced = torch.jit.trace(model.decoder, latents)
        assert str(traced.inlined_graph).count("gnsilu::group_norm_silu") == 13
        torch.testing.assert_close(traced(latents), wanted, rtol=1e-4, atol=1e-5)
        mid_block = torch.compile(model.decoder.mid_block, backend="eager", fullgraph=True)
        x = noise(1, 16, 8, 8)
        torch.testing.assert_close(mid_block(x), model.decoder.mid_block(x))
        decoder = torch.compile(model.decoder, backend="aot_eager")
        torch.testing.assert_close(decoder(latents), wanted, rtol=1e-4, atol=1e-5)


def test_patched_model_is_copied_saved_and_loaded(tmp_path):
    model = image_autoencoder()
    report = gnsilu.patch(model)
    with torch.no_grad():
        wanted = run(model)
        assert torch.equal(run(copy.deepcopy(model)), wanted)
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(run(torch.load(tmp_path / "model.pt", weights_only=False)), wanted)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert gnsilu.patch(loaded) == report
        assert torch.equal(run(loaded), wanted)
