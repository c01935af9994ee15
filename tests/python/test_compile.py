"""torch.compile, torch.export and the dispatcher's own checks."""

from __future__ import annotations

import gnsilu
import pytest
import torch
from inputs import BF16, random_x
from reference import same_bits
from torch import Tensor, nn

OP = torch.ops.gnsilu.group_norm_silu.default
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def sample_arguments(device):
    x = torch.randn(2, 16, 9, 9, device=device)
    weight, bias = torch.randn(16, device=device), torch.randn(16, device=device)
    last = x.contiguous(memory_format=torch.channels_last)
    return {
        "one span": (x.to(BF16), 4, weight, bias, 1e-5, None),
        "several spans": (torch.randn(1, 16, 65, 65, device=device).to(BF16), 2),
        "result dtype": (x.half(), 4, None, bias, 1e-5, BF16),
        "channels_last": (last.to(BF16), 4, weight, None, 1e-5, torch.float16),
        "strided": (x.to(BF16)[..., ::2], 4),
        "empty": (x.to(BF16)[:, :, :0], 4, weight, bias),
        "FP32": (x, 4, weight, bias),
        "FP64": (x.double(), 4, weight, bias),
        "gradient": (x.clone().requires_grad_(), 4, weight.clone().requires_grad_(), bias),
        "16-bit gradient": (x.to(BF16).requires_grad_(), 4),
    }


@pytest.mark.parametrize("case", sample_arguments("cpu"))
def test_case_34_opcheck(case, device):
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # PyTorch's own gradient of a group norm takes no dynamic sizes before 2.9.
    if "gradient" not in case or TORCH >= (2, 9):
        utilities.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(OP, sample_arguments(device)[case], test_utils=utilities)


@pytest.mark.parametrize("case", ["one span", "result dtype"])
def test_case_34_opcheck_without_the_activation(case, device):
    torch.library.opcheck(torch.ops.gnsilu.group_norm.default, sample_arguments(device)[case])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one span", "result dtype"])
def test_case_34_opcheck_of_the_fallback_on_a_gpu(case, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", "fallback")
    torch.library.opcheck(OP, sample_arguments("cuda")[case])


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["three_pass", "two_pass", "resident", "ring"])
def test_case_34_opcheck_on_every_route(route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    # The ring takes groups of several tiles on; resident what shared memory holds.
    x = random_x((1, 4, 24, 24) if route == "resident" else (1, 4, 512, 512), BF16, "cuda")
    assert gnsilu.explain(x, 2).route == route
    torch.library.opcheck(OP, (x, 2, None, None, 1e-5, torch.float16))


def test_ops_are_marked_compliant():
    for op in (OP, torch.ops.gnsilu.group_norm.default):
        assert torch.Tag.pt2_compliant_tag in op.tags


# --- torch.compile -------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = gnsilu.GroupNormSiLU(8, 32, eps=1e-6)
        self.conv1 = nn.Conv2d(32, 16, 3, padding=1)
        self.norm2 = gnsilu.GroupNormSiLU(4, 16, eps=1e-6)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.shortcut = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.norm1(x))
        return self.shortcut(x) + self.conv2(self.norm2(y))


# Ten, of one span a group and of several; on a CPU, of several groups a slice and of less than one.
SIZES = [
    (5, 8),
    (8, 11),
    (16, 16),
    (17, 20),
    (31, 33),
    (32, 32),
    (33, 31),
    (40, 43),
    (64, 80),
    (96, 9),
]


def assert_compiled_bits(module: nn.Module, backend: str, device: torch.device) -> None:
    """Eager's bits at every size, by a full graph and one recompilation at most."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        for size in SIZES:
            x = random_x((1, 32, *size), BF16, device)
            assert same_bits(compiled(x), module(x))
    assert counter.frame_count <= 2


def test_case_34_compiled_norm_gives_the_eager_bits_at_ten_sizes(device):
    norm = gnsilu.GroupNormSiLU(8, 32).to(device, BF16).eval()
    assert_compiled_bits(norm, "inductor", device)


def test_case_34_compiled_block_gives_the_eager_bits_at_ten_sizes(device):
    # Inductor may choose another algorithm for a convolution: its bits are not ours to promise.
    assert_compiled_bits(Block().to(device, BF16).eval(), "aot_eager", device)


def test_case_34_batches_and_sizes_together(routed_device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    norm = gnsilu.GroupNormSiLU(8, 32).to(routed_device, BF16).eval()
    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    with torch.no_grad():
        for samples, size in enumerate(SIZES, start=2):
            x = random_x((samples, 32, *size), BF16, routed_device)
            assert same_bits(compiled(x), norm(x))
    assert counter.frame_count <= 2


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
    compiled = torch.compile(
        lambda x: gnsilu.group_norm_silu(x, 4.0, weight, weight, 1, torch.bfloat16),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x), gnsilu.group_norm_silu(x, 4, weight, weight, 1.0))


# --- torch.export --------------------------------------------------------------------------------

# Elements of a map of 8 channels in 2 groups around every size at which something changes: a
# second span; on a CPU, a sample, then a group larger than the fallback's slice; longer spans. On
# a GPU also the tuner's 32 MiB, and the fallback's slice there.
MAPS = [1024, 65536, 131072, 524288]
MAPS_GPU = [*MAPS, 1048576, 2097152]


def test_case_34_exported_with_dynamic_sizes_across_every_threshold(routed_device):
    device = routed_device
    norm = gnsilu.GroupNormSiLU(2, 8).to(device, BF16).eval()
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    with torch.no_grad():
        program = torch.export.export(
            norm,
            (random_x((3, 8, 12, 10), BF16, device),),
            dynamic_shapes={"x": {0: batch, 2: height, 3: width}},
        )
        assert OP in [node.target for node in program.graph.nodes]
        exported = program.module()
        shapes = [(3, 12, 10), (1, 1, 1), (2, 1, 7), (5, 33, 1), (70, 3, 5)]
        for size in MAPS_GPU if device.type == "cuda" else MAPS:
            shapes += [(1, 32, size // 32), (1, 1, size + 1)]
        for samples, *size in shapes:
            x = random_x((samples, 8, *size), BF16, device)
            assert same_bits(exported(x), norm(x))


def test_case_34_exported_block_has_dynamic_sizes(device):
    block = Block().to(device, BF16).eval()
    batch, height, width = (torch.export.Dim(name, min=2) for name in ("batch", "height", "width"))
    with torch.no_grad():
        program = torch.export.export(
            block,
            (random_x((2, 32, 12, 10), BF16, device),),
            dynamic_shapes={"x": {0: batch, 2: height, 3: width}},
        )
        for shape in ((2, 32, 12, 10), (3, 32, 7, 33), (5, 32, 64, 65)):
            x = random_x(shape, BF16, device)
            assert same_bits(program.module()(x), block(x))


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
