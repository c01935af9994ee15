"""What the CUDA routes have to live with: graphs, streams, other devices, little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gnsilu
import pytest
import torch
from inputs import BF16, FP16, FP32, random_x
from reference import assert_exact, same_bits

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# auto: resident or, for large groups, two_pass.
ROUTES = ["auto", "two_pass", "three_pass", "fallback"]


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def assert_succeeds(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()  # or one that hangs stays
    assert process.returncode == 0, errors


# --- graphs and streams ---------------------------------------------------------------------------

FIRST_CALL_IN_A_GRAPH = """
    import torch, gnsilu
    x = torch.randn(2, 64, {size}, {size}, device="cuda").to(torch.bfloat16)
    y = torch.empty_like(x)
    default = gnsilu.explain(x, 32).config
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(gnsilu.group_norm_silu(x, 32))
    assert gnsilu.explain(x, 32).config == default
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, gnsilu.group_norm_silu(x, 32))
"""


def test_case_38_first_call_inside_a_graph(tmp_path):
    # 8: small_groups; 64: resident; 500: two_pass, which would be tuned, but not in a capture.
    kinds = [(loading, size) for loading in ("LAZY", "EAGER") for size in (8, 64, 500)]
    processes = [
        start_python(
            FIRST_CALL_IN_A_GRAPH.format(size=size),
            CUDA_MODULE_LOADING=loading,
            GNSILU_CACHE_DIR=str(tmp_path / f"{loading}-{size}"),
        )
        for loading, size in kinds
    ]
    for process in processes:
        assert_succeeds(process)


def captured(x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gnsilu.group_norm_silu(x, 32)
    return graph, y


def disturb_the_allocator(value: int) -> None:
    """Takes and fills memory of several sizes: what a graph freed too early is overwritten."""
    kept = [torch.empty(1 << bits, device="cuda").fill_(value) for bits in (10, 16, 20, 22)]
    del kept


def test_case_39_graphs_of_a_small_and_a_larger_call_in_turn():
    small, large = random_x((1, 64, 64, 64), BF16, GPU), random_x((1, 64, 600, 600), BF16, GPU)
    gnsilu.group_norm_silu(small, 32)
    graphs = [captured(small)]
    disturb_the_allocator(1)
    gnsilu.group_norm_silu(large, 32)
    graphs.append(captured(large))
    for step, which in enumerate((0, 1, 0, 1, 1, 0)):
        x = (small, large)[which]
        graph, y = graphs[which]
        x.copy_(random_x(tuple(x.shape), BF16, GPU).mul_(step + 1))
        y.zero_()
        disturb_the_allocator(step)
        graph.replay()
        graph.replay()  # back to back
        disturb_the_allocator(step)
        assert same_bits(y, gnsilu.group_norm_silu(x, 32))
        assert_exact(y, x, 32)


@pytest.mark.parametrize("size", [8, 64, 600])
def test_case_39_one_call_on_two_streams_at_once(size):
    x = random_x((4, 64, size, size), BF16, GPU)
    want = gnsilu.group_norm_silu(x, 32)
    assert_exact(want, x, 32)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results += [gnsilu.group_norm_silu(x, 32) for _ in range(2)]
        torch.cuda.synchronize()
        assert all(same_bits(y, want) for y in results)


@pytest.mark.parametrize("size", [64, 600])
@pytest.mark.parametrize("route", ROUTES)
def test_case_40_x_is_late_and_its_memory_reused_at_once(route, size, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    x = random_x((1, 64, size, size), BF16, GPU)
    want = gnsilu.group_norm_silu(x, 32)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # x is ready only after a while
            late = x.clone()
            y = gnsilu.group_norm_silu(late, 32)
            late.fill_(float("nan"))  # as its next owner on this stream would
            del late
            torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        assert same_bits(y, want)


OTHER_DEVICE = """
    import torch, gnsilu
    x = torch.randn(1, 64, {size}, {size}).to(torch.bfloat16)
    torch.cuda.set_device(0)
    far = x.to("cuda:1")
    cold = gnsilu.group_norm_silu(far, 32)
    warm = gnsilu.group_norm_silu(far, 32)
    assert torch.cuda.current_device() == 0
    near = gnsilu.group_norm_silu(x.to("cuda:0"), 32)
    for y in (cold, warm):
        assert y.device == far.device
        assert torch.equal(y.cpu(), near.cpu())
"""


@pytest.mark.two_gpus
def test_case_41_x_on_another_device_than_the_current(tmp_path):
    # 700 is of a size that is tuned in the first call: on x's device and stream.
    processes = [
        start_python(OTHER_DEVICE.format(size=size), GNSILU_CACHE_DIR=str(tmp_path / str(size)))
        for size in (8, 64, 700)
    ]
    for process in processes:
        assert_succeeds(process)
    x = random_x((1, 64, 130, 131), BF16, torch.device("cuda:1"))
    with torch.cuda.device(0):
        assert_exact(gnsilu.group_norm_silu(x, 32), x, 32)


@pytest.mark.parametrize("route", ROUTES)
def test_case_43_warm_calls_do_not_synchronise(route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    for shape in ((2, 64, 8, 8), (1, 64, 100, 101), (1, 64, 700, 701)):
        x = random_x(shape, BF16, GPU)
        weight = torch.ones(64, device="cuda", dtype=torch.float64)
        for dtype in (BF16, FP16, FP32):
            want = gnsilu.group_norm_silu(x, 32, weight, weight, dtype=dtype)
            torch.cuda.set_sync_debug_mode("error")
            try:
                y = gnsilu.group_norm_silu(x, 32, weight, weight, dtype=dtype)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert same_bits(y, want)


# --- shared memory --------------------------------------------------------------------------------


def test_threads_whose_groups_need_different_shared_memory():
    """The limit that a launch needs belongs to the kernel: one thread must not lower another's."""
    inputs = [random_x((1, 512, size), BF16, GPU) for size in (30_000, 100_000)]
    for x in inputs:
        assert gnsilu.explain(x, 512).route == "resident"
    wanted = [gnsilu.group_norm_silu(x, 512) for x in inputs]
    torch.cuda.synchronize()

    def run(which: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [gnsilu.group_norm_silu(inputs[which], 512) for _ in range(30)]
            return all(same_bits(y, wanted[which]) for y in results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, (0, 1, 0, 1)))


BARELY_BEYOND_48_KB = """
    import torch, gnsilu
    x = torch.randn(16, 1024, 25, 30, device="cuda").to(torch.bfloat16)
    assert gnsilu.explain(x, 32).route == "resident"
    y = gnsilu.group_norm_silu(x, 32)
    assert torch.equal(y[:1], gnsilu.group_norm_silu(x[:1].clone(), 32))
"""


def test_shared_memory_that_the_kernel_declares_counts():
    """48 KB need no permission, but with what the kernel declares these are more."""
    assert_succeeds(start_python(BARELY_BEYOND_48_KB))


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


LITTLE_MEMORY = """
    import torch, gnsilu
    x = torch.randn(1, 64, 700, 700, device="cuda").to(torch.bfloat16)
    torch.cuda.synchronize()
    results = []
    # Beyond the result; 2 MiB is what torch's allocator takes from the driver for a workspace, and
    # results of more than 1 MiB are rounded up to 2 MiB. Each dtype is tuned on its own.
    for room, dtype in ((64 << 20, torch.bfloat16), (4 << 20, torch.float16)):
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        limit = torch.cuda.memory_reserved() + x.nbytes + room
        torch.cuda.set_per_process_memory_fraction(limit / total)
        results.append(gnsilu.group_norm_silu(x, 32, dtype=dtype))
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_reserved() <= limit
    torch.cuda.set_per_process_memory_fraction(1.0)  # the check, too, takes memory
    for y in results:
        want = gnsilu.group_norm_silu(x.cpu(), 32, dtype=y.dtype)
        assert (y.cpu() != want).double().mean() < 1e-3
"""


def test_case_42_a_cold_call_where_little_memory_is_left(tmp_path: Path):
    assert_succeeds(start_python(LITTLE_MEMORY, GNSILU_CACHE_DIR=str(tmp_path)))


@pytest.mark.parametrize("route", ["auto", "fallback"])
def test_case_42_out_of_memory_is_torchs_error_and_leaves_nothing_behind(route, monkeypatch):
    monkeypatch.setenv("GNSILU_ROUTE", route)
    torch.cuda.empty_cache()  # nothing that earlier tests left may serve the call
    x = random_x((1, 64, 600, 600), BF16, GPU)
    want = gnsilu.group_norm_silu(x, 32)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + (16 << 20)) / total
        )
        with pytest.raises(torch.OutOfMemoryError):
            gnsilu.group_norm_silu(x, 32, dtype=FP32)
        assert torch.cuda.memory_allocated() == held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same_bits(gnsilu.group_norm_silu(x, 32), want)
