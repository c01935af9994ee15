"""What the CUDA routes have to live with: configurations, graphs, streams, memory, devices."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import gnsilu
import pytest
import torch
from gnsilu import _C
from reference import assert_exact

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SHAPES = [((1, 32, 65, 67), 4), ((2, 24, 128, 128), 2), ((1, 8, 1, 6141), 2), ((3, 12, 8, 8), 3)]


def activation(shape=(1, 64, 128, 96), dtype=BF16, device="cuda") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(shape, generator=generator) * 3 + 1).to(device, dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- bits depend on values, shape and route alone -----------------------------------------------


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_every_candidate_gives_the_same_bits(shape, groups, dtypes, silu):
    x = activation(shape, dtypes[0])
    weight = torch.randn(shape[1], device="cuda")
    results = [
        torch.ops.gnsilu._three_pass_with_config(
            x,
            groups,
            weight,
            None,
            1e-6,
            dtypes[1],
            silu,
            config.threads,
            config.vectors_in_flight,
        )
        for config in _C.candidates(_C.Route.three_pass)
    ]
    assert len(results) > 1
    assert all(same_bits(result, results[0]) for result in results)
    assert_exact(results[0], x, groups, weight, None, 1e-6, silu)


def test_other_configurations_are_refused():
    with pytest.raises(RuntimeError, match="config is 3 threads"):
        torch.ops.gnsilu._three_pass_with_config(
            activation(), 4, None, None, 1e-6, None, True, 3, 4
        )


@pytest.mark.parametrize("shape", [(1, 64, 256, 256), (2, 320, 16, 16)], ids=str)
def test_repeated_runs_give_the_same_bits(shape):
    x = activation(shape)
    noise = torch.randn(1 << 24, device="cuda")
    want = gnsilu.group_norm_silu(x, 32)
    side = torch.cuda.Stream()
    for run in range(200):
        if run % 2:  # half of them beside traffic on another stream
            with torch.cuda.stream(side):
                noise.mul_(1.0001)
        assert same_bits(gnsilu.group_norm_silu(x, 32), want)


@pytest.mark.parametrize("size", [8, 65, 200])
def test_a_sample_and_a_permutation_of_groups_keep_their_bits(size):
    x = activation((5, 32, size, size))
    weight, bias = torch.randn(32, device="cuda"), torch.randn(32, device="cuda")
    y = gnsilu.group_norm_silu(x, 8, weight, bias)
    for sample in (0, 4):
        alone = gnsilu.group_norm_silu(x[sample : sample + 1].contiguous(), 8, weight, bias)
        assert same_bits(alone, y[sample : sample + 1].contiguous())
    order = torch.randperm(8, device="cuda")
    channels = (order[:, None] * 4 + torch.arange(4, device="cuda")).view(-1)
    permuted = gnsilu.group_norm_silu(
        x[:, channels].contiguous(), 8, weight[channels], bias[channels]
    )
    assert same_bits(permuted, y[:, channels].contiguous())


def test_more_partial_results_than_the_workspace_holds():
    x = activation((16, 512, 65, 64))  # 16 * 512 groups of two spans
    assert gnsilu.explain(x, 512).workspace_bytes <= 1 << 20
    y = gnsilu.group_norm_silu(x, 512)
    assert_exact(y, x, 512)
    assert same_bits(y[15:], gnsilu.group_norm_silu(x[15:].contiguous(), 512))


# --- large and many -----------------------------------------------------------------------------


def test_more_than_2_31_elements():
    x = torch.randn(1, 128, 4097, 64, device="cuda").to(BF16).repeat(1, 1, 1, 64)
    assert x.numel() > 2**31
    y = gnsilu.group_norm_silu(x, 32)
    assert_exact(y[:, 124:], x[:, 124:], 1)
    assert_exact(y[:, :4], x[:, :4], 1)


def test_last_sample_beyond_2_31_elements_equals_itself_alone():
    x = torch.randn(1, 512, 1024, 1024, device="cuda").to(BF16).expand(5, -1, -1, -1).contiguous()
    x[4].mul_(2).add_(1)
    y = gnsilu.group_norm_silu(x, 32)
    assert same_bits(y[4:], gnsilu.group_norm_silu(x[4:].clone(), 32))


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((128, 512, 8, 8), 32),
        ((65536, 32, 2, 2), 1),
        ((65536, 32, 2, 2), 32),
        ((200000, 32, 2, 2), 32),
        ((2, 65536, 3, 3), 65536),
        ((1, 70000, 80, 80), 70000),
    ],
    ids=str,
)
def test_many_groups_and_rows(shape, groups):
    x = torch.randn(shape, device="cuda").to(BF16)
    y = gnsilu.group_norm_silu(x, groups)
    assert_exact(y[:3], x[:3], groups)
    assert_exact(y[-3:], x[-3:], groups)


# --- graphs and streams ---------------------------------------------------------------------------

FIRST_CALL_IN_A_GRAPH = """
    import torch, gnsilu
    x = torch.randn(1, 64, {size}, {size}, device="cuda").to(torch.bfloat16)
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(gnsilu.group_norm_silu(x, 32))
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, gnsilu.group_norm_silu(x, 32))
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
@pytest.mark.parametrize("size", [8, 600])  # 600: of a size that would be tuned
def test_first_call_inside_a_graph(size, loading, tmp_path):
    result = run_python(
        FIRST_CALL_IN_A_GRAPH.format(size=size),
        CUDA_MODULE_LOADING=loading,
        GNSILU_CACHE_DIR=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr


def test_two_graphs_replayed_in_turn():
    small, large = activation((1, 64, 64, 64)), activation((1, 64, 256, 256))
    gnsilu.group_norm_silu(small, 32)
    torch.cuda.synchronize()
    graphs, results = [], []
    for x in (small, large):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(gnsilu.group_norm_silu(x, 32))
        graphs.append(graph)
        torch.empty(1 << 20, device="cuda").fill_(1)
    for which in (0, 1, 0, 1, 1, 0):
        results[which].zero_()
        graphs[which].replay()
        graphs[which].replay()
        torch.empty(1 << 22, device="cuda").fill_(which)
        assert same_bits(results[which], gnsilu.group_norm_silu((small, large)[which], 32))


def test_side_streams():
    x = activation((1, 64, 256, 256))
    want = gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # x is ready only after a while
                ready = x.clone()
                results.append(gnsilu.group_norm_silu(ready, 32))
                ready.zero_()
                del ready
        torch.cuda.synchronize()
        assert all(same_bits(y, want) for y in results)


def test_warm_calls_do_not_synchronise():
    x = activation((1, 64, 512, 600))
    gnsilu.group_norm_silu(x, 32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gnsilu.group_norm_silu(x, 32)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.two_gpus
@pytest.mark.parametrize("size", [33, 700])
def test_x_on_another_device_than_the_current(size):
    x = activation((1, 64, size, size), device="cuda:1")
    with torch.cuda.device(0):
        y = gnsilu.group_norm_silu(x, 32)
        assert torch.cuda.current_device() == 0
    assert y.device == x.device
    assert same_bits(y.to("cuda:0"), gnsilu.group_norm_silu(x.to("cuda:0"), 32))


def test_nothing_is_launched_for_empty_inputs():
    def kernels(shape: tuple[int, ...]) -> list[str]:
        x = torch.empty(shape, dtype=BF16, device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            gnsilu.group_norm_silu(x, 32)
            gnsilu.explain(x, 32)
            torch.cuda.synchronize()
        return [event.name for event in profile.events() if "gnsilu" in event.name]

    assert kernels((2, 64, 0, 8)) == []
    assert len(kernels((2, 64, 8, 8))) == 1  # whole_groups; explain() launches nothing


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 256, 1024, 1024), (4, 512, 64, 64), (2, 1280, 8, 8)], ids=str
)
@pytest.mark.parametrize("tune", ["0", "1"])
def test_peak_memory_beyond_the_result(shape, tune, monkeypatch):
    monkeypatch.setenv("GNSILU_TUNE", tune)
    x = torch.randn(shape, device="cuda").to(BF16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = gnsilu.group_norm_silu(x, 32)
    assert torch.cuda.max_memory_allocated() - before - y.numel() * 2 <= 1 << 20


def test_out_of_memory_is_torchs_error():
    torch.cuda.empty_cache()  # nothing that earlier tests left may serve the call
    x = activation((1, 64, 600, 600))
    want = gnsilu.group_norm_silu(x, 32)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + (16 << 20)) / total
        )
        with pytest.raises(torch.OutOfMemoryError):
            gnsilu.group_norm_silu(x, 32, dtype=torch.float32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same_bits(gnsilu.group_norm_silu(x, 32), want)
