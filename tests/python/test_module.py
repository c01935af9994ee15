"""gnsilu.GroupNormSiLU beside nn.GroupNorm and nn.SiLU."""

from __future__ import annotations

import copy
import io
import pickle

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


def test_copies_and_pickles(device):
    module = gnsilu.GroupNormSiLU(4, 16, dtype=torch.float16).to(device)
    nn.init.normal_(module.weight)
    x = torch.randn(2, 16, 33, 129, device=device).to(BF16)
    want = module(x)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(other(x), want)


def run_in_child(module, x, results):
    results.put(module(x).tolist())


def test_spawned_process():
    module = gnsilu.GroupNormSiLU(4, 16, dtype=torch.float16)
    nn.init.normal_(module.weight)
    x = torch.randn(2, 16, 9, 9).to(BF16)
    want = module(x).detach()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=run_in_child, args=(module.requires_grad_(False), x, results))
    child.start()
    assert results.get(timeout=120) == want.tolist()
    child.join()
    assert child.exitcode == 0


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
