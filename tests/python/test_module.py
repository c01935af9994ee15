"""gnsilu.GroupNormSiLU beside nn.GroupNorm and nn.SiLU."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import pickle
import subprocess
import sys

import gnsilu
import pytest
import torch
from torch import nn

BF16 = torch.bfloat16


def trained(affine: bool = True) -> nn.GroupNorm:
    norm = nn.GroupNorm(4, 16, eps=1e-3, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_load_both_ways(affine):
    norm = trained(affine)
    fused = gnsilu.GroupNormSiLU(4, 16, 1e-3, affine)
    fused.load_state_dict(norm.state_dict())
    back = nn.GroupNorm(4, 16, eps=1e-3, affine=affine)
    back.load_state_dict(fused.state_dict())
    x = torch.randn(2, 16, 5, 5)
    want = nn.functional.silu(norm(x))
    torch.testing.assert_close(fused(x), want)
    torch.testing.assert_close(nn.functional.silu(back(x)), want)


def test_result_dtype(device):
    x = torch.randn(2, 16, 5, 5, device=device).to(BF16)
    for dtype in (None, torch.float16, torch.float32, BF16):
        module = gnsilu.GroupNormSiLU(4, 16, dtype=dtype, device=device)
        assert module(x).dtype == (dtype or BF16)


def result_of(module: nn.Module, device: torch.device) -> str:
    """Digest of the module's result; on a GPU for an x so large that the call is tuned."""
    shape = (1, 16, 1100, 1000) if device.type == "cuda" else (2, 16, 33, 129)
    x = torch.arange(math.prod(shape), device=device).remainder(251).to(BF16).view(shape)
    with torch.no_grad():
        y = module(x)
    assert y.dtype == torch.float16
    return hashlib.sha256(y.cpu().view(torch.int16).numpy().tobytes()).hexdigest()


def module_that_has_called(device: torch.device) -> tuple[gnsilu.GroupNormSiLU, str]:
    torch.manual_seed(2)
    module = gnsilu.GroupNormSiLU(4, 16, eps=1e-3, dtype=torch.float16)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    module.to(device)
    return module, result_of(module, device)


def saved_and_loaded(module: nn.Module, **options: object) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False, **options)


def test_case_37_copies(device):
    module, want = module_that_has_called(device)
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is gnsilu.GroupNormSiLU and repr(other) == repr(module)
        assert result_of(other, device) == want
    other = copy.deepcopy(module)
    nn.init.zeros_(other.weight)
    assert result_of(other, device) != want  # the copy's parameters are its own
    assert result_of(module, device) == want


def test_case_37_torch_save(device):
    module, want = module_that_has_called(device)
    assert result_of(saved_and_loaded(module), device) == want
    on_cpu = saved_and_loaded(module, map_location="cpu")
    assert result_of(on_cpu.to(device), device) == want
    state = io.BytesIO()
    torch.save(module.state_dict(), state)
    state.seek(0)
    other = gnsilu.GroupNormSiLU(4, 16, eps=1e-3, dtype=torch.float16, device=device)
    other.load_state_dict(torch.load(state, weights_only=True))
    assert result_of(other, device) == want


def send_results(module: nn.Module, devices: list[torch.device], results: object) -> None:
    results.put([result_of(module.to(device), device) for device in devices])


def test_case_37_spawned_process():
    """One child for the CPU and, where there is one, a GPU: starting it is what takes long."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [torch.device(name) for name in names]
    want = [module_that_has_called(device)[1] for device in devices]
    module, _ = module_that_has_called(devices[-1])
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    module.cpu().requires_grad_(False)  # autograd's leaves are not sent
    child = context.Process(target=send_results, args=(module, devices, results))
    child.start()
    try:
        assert results.get(timeout=60) == want
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_symbolic_tracing_keeps_the_call_whole():
    module = gnsilu.GroupNormSiLU(4, 16)
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(16, 16, 1), module))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [gnsilu.group_norm_silu]
    x = torch.randn(2, 16, 5, 5)
    assert torch.equal(traced(x), module(traced.get_submodule("0")(x)))


def test_conversions(device):
    module = gnsilu.GroupNormSiLU(4, 16).to(device).half()
    assert module.weight.dtype == torch.float16
    x = torch.randn(2, 16, 5, 5, device=device).to(BF16)
    assert module(x).dtype == BF16


def test_channels_last(device):
    module = gnsilu.GroupNormSiLU(4, 16).to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 16, 5, 7, device=device).to(memory_format=torch.channels_last)
    y = module(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module(x.contiguous()))


def test_first_values_and_reset():
    module = gnsilu.GroupNormSiLU(4, 16)
    nn.init.normal_(module.weight)
    module.reset_parameters()
    assert (module.weight == 1).all() and (module.bias == 0).all()


def test_names_what_is_wrong():
    with pytest.raises(ValueError, match="num_groups is 5, num_channels 16"):
        gnsilu.GroupNormSiLU(5, 16)
    with pytest.raises(ValueError, match="num_groups is 0"):
        gnsilu.GroupNormSiLU(0, 16)


def test_numbers_of_other_types():
    import numpy

    module = gnsilu.GroupNormSiLU(numpy.int64(4), numpy.int64(16), eps=1)
    assert (type(module.num_groups), type(module.eps)) == (int, float)
    torch.jit.script(module)


def test_repr():
    module = gnsilu.GroupNormSiLU(4, 16, dtype=BF16)
    assert repr(module) == "GroupNormSiLU(4, 16, eps=1e-05, affine=True, dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_groups": 2, "num_channels": -8}, ValueError, "num_channels -8"),
        ({"eps": -1}, ValueError, "eps is -1.0"),
        ({"eps": math.nan}, ValueError, "eps is nan"),
        ({"dtype": "half"}, TypeError, "dtype is a str"),
        ({"dtype": torch.int32}, ValueError, "dtype is torch.int32"),
    ],
)
def test_bad_settings(arguments, error, words):
    with pytest.raises(error, match=words):
        gnsilu.GroupNormSiLU(**{"num_groups": 4, "num_channels": 16, **arguments})


# What two processes compute of one batch, each of its half, is what one computes of all of it.
DISTRIBUTED = """
import os, sys
import gnsilu, torch
from torch import nn
rank = int(sys.argv[1])
store = torch.distributed.FileStore(sys.argv[2], 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(4, 8, 3), gnsilu.GroupNormSiLU(2, 8), nn.Conv2d(8, 4, 3))
parallel = nn.parallel.DistributedDataParallel(model)
x = torch.randn(4, 4, 9, 9)
parallel(x[2 * rank : 2 * rank + 2]).square().mean().backward()
found = [parameter.grad for parameter in model.parameters()]
wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
for f, w in zip(found, wanted, strict=True):
    torch.testing.assert_close(f, w)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_distributed_data_parallel(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    command = [sys.executable, "-c", DISTRIBUTED]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
