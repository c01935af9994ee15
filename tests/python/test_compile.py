"""torch.compile, torch.export and the dispatcher's own checks."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from torch import nn

BF16 = torch.bfloat16
OP = torch.ops.gnsilu.group_norm_silu.default


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def sample_arguments(device):
    x = torch.randn(2, 16, 9, 9, device=device)
    weight, bias = torch.randn(16, device=device), torch.randn(16, device=device)
    last = x.contiguous(memory_format=torch.channels_last)
    return {
        "fused or fallback": (x.to(BF16), 4, weight, bias, 1e-5, None),
        "several spans": (torch.randn(1, 16, 65, 65, device=device).to(BF16), 2),
        "result dtype": (x.half(), 4, None, bias, 1e-5, BF16),
        "channels_last": (last.to(BF16), 4, weight, None, 1e-5, torch.float16),
        "strided": (x.to(BF16)[..., ::2], 4),
        "FP32": (x, 4, weight, bias),
        "gradient": (x.clone().requires_grad_(), 4, weight.clone().requires_grad_(), bias),
        "16-bit gradient": (x.to(BF16).requires_grad_(), 4),
    }


@pytest.mark.parametrize("case", sample_arguments("cpu"))
@pytest.mark.parametrize("op", [OP, torch.ops.gnsilu.group_norm.default])
def test_opcheck(op, case, device):
    torch.library.opcheck(op, sample_arguments(device)[case])


def test_ops_are_marked_compliant():
    for op in (OP, torch.ops.gnsilu.group_norm.default):
        assert torch.Tag.pt2_compliant_tag in op.tags


class Block(nn.Module):
    """What stands between two convolutions of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = gnsilu.GroupNormSiLU(8, 32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(self.norm(x))


def test_compiled_block_gives_the_eager_bits_at_every_size(device):
    norm = gnsilu.GroupNormSiLU(8, 32).to(device, BF16).eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    with torch.no_grad():
        for size in (5, 8, 16, 17, 24, 31, 40, 48, 64, 96):
            x = torch.randn(1, 32, size, size + 3, device=device).to(BF16)
            assert torch.equal(compiled(x), norm(x))
    assert counter.frame_count <= 2  # at most one recompilation, when sizes become dynamic


def test_compiled_block_with_gradients(device):
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 32, 10, 10, device=device)
    want = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    got = torch.autograd.grad(compiled(x).square().sum(), list(block.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_compiled_function_normalises_its_arguments(device):
    x = torch.randn(2, 8, 6, 6, device=device).to(BF16)
    weight = torch.randn(8, device=device)
    for arguments in ((4, weight, None), (4, None, weight), (4, None, None), (4.0, weight, weight)):
        compiled = torch.compile(
            lambda x, a=arguments: gnsilu.group_norm_silu(x, *a, 1e-5, torch.bfloat16),
            fullgraph=True,
            backend="aot_eager",
        )
        assert torch.equal(compiled(x), gnsilu.group_norm_silu(x, *arguments))


def test_export_with_dynamic_batch_and_sizes(device):
    block = Block().to(device, BF16).eval()
    x = torch.randn(2, 32, 12, 10, device=device).to(BF16)
    batch, height, width = (torch.export.Dim(name, min=2) for name in ("batch", "height", "width"))
    with torch.no_grad():
        program = torch.export.export(
            block, (x,), dynamic_shapes={"x": {0: batch, 2: height, 3: width}}
        )
        targets = [node.target for node in program.graph.nodes]
        assert OP in targets
        for shape in ((2, 32, 12, 10), (3, 32, 7, 33), (5, 32, 64, 65)):
            inputs = torch.randn(shape, device=device).to(BF16)
            torch.testing.assert_close(program.module()(inputs), block(inputs))


def test_fake_tensors_agree_with_real_ones(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for arguments in sample_arguments(device).values():
        real = OP(*arguments)
        with mode:
            fake = OP(
                *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
            )
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        assert fake.device == real.device
