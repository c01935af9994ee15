"""Timing: device time by CUDA graphs and events, host time a call, CPU time, and on what machine.

100 % is a copy of the same bytes in the same process and cache state. Variants of one comparison
are interleaved (A B C A B C ...), so that clocks and neighbours hit them alike; what is reported
is the median with its 10th and 90th percentile. A variant is a function from x to a fresh y.
"""

from __future__ import annotations

import math
import platform
import re
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnsilu.introspection import build_info

Variant = Callable[[Tensor], Tensor]


def copy_kernel(x: Tensor) -> Tensor:
    """A copy by a kernel (of inverted bits): from 512 MiB on faster than the driver's copy.

    x is contiguous; flat, so that no odd size stands against words of 32 bits.
    """
    flat = x.view(-1)
    return torch.bitwise_not(flat.view(torch.int16 if flat.numel() % 2 else torch.int32))


# The ruler is the faster of the two.
COPIES: dict[str, Variant] = {"copy": torch.clone, "copy_kernel": copy_kernel}

MIN_REPLAY_US = 2000.0  # a graph: long against the start of its replay and the events
MAX_REPEATS = 40  # but no more calls than this, or one of each input
MAX_INPUTS = 300
MIN_SAMPLES, MAX_SAMPLES = 7, 60


@dataclass(frozen=True)
class Timing:
    """Microseconds a call."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, microseconds: list[float]) -> Timing:
        ordered = sorted(microseconds)

        def quantile(q: float) -> float:
            return ordered[round(q * (len(ordered) - 1))]

        return cls(statistics.median(ordered), quantile(0.1), quantile(0.9), len(ordered))


# -------------------------------------------------------------------------------- device time


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _microseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return 1000.0 * float(start.elapsed_time(end))


def one_call(call: Callable[[], object]) -> float:
    """Microseconds from before a call to the end of what it queued, host time included."""
    start, end = _event(), _event()
    start.record()
    call()
    end.record()
    end.synchronize()
    return _microseconds(start, end)


def _rough_us(variant: Variant, x: Tensor) -> float:
    """One warm call: only to size the graphs."""
    for _ in range(3):
        variant(x)
    return one_call(lambda: variant(x))


def rotating_inputs(x: Tensor) -> list[Tensor]:
    """x and copies of it, together twice the L2: each is cold again when its turn comes."""
    l2 = torch.cuda.get_device_properties(x.device).L2_cache_size
    count = min(MAX_INPUTS, max(1, math.ceil(2 * l2 / x.nbytes)))
    return [x] + [x.clone() for _ in range(count - 1)]


def _capture(
    variant: Variant, inputs: list[Tensor], launches: int, pool: Any
) -> torch.cuda.CUDAGraph:
    """A graph of that many calls over the inputs in turn.

    As many outputs are held as there are inputs, so that the writes are as cold as the reads.
    """
    graph = torch.cuda.CUDAGraph()
    outputs: deque[Tensor] = deque(maxlen=len(inputs))
    with torch.cuda.graph(graph, pool=pool):
        for i in range(launches):
            outputs.append(variant(inputs[i % len(inputs)]))
    return graph


def samples_of(replay_s: dict[str, float], budget_s: float) -> dict[str, int]:
    """How often to replay each: those that take longer less often."""
    share_s = budget_s / len(replay_s)
    return {
        name: max(MIN_SAMPLES, min(MAX_SAMPLES, int(share_s / seconds)))
        for name, seconds in replay_s.items()
    }


def interleaved(samples: dict[str, int]) -> list[list[str]]:
    """Rounds of those whose turn it is: the samples of each are spread evenly over all rounds."""
    count = max(samples.values())
    return [
        [name for name, n in samples.items() if (i + 1) * n // count > i * n // count]
        for i in range(count)
    ]


@torch.no_grad()
def device_times(
    variants: dict[str, Variant], x: Tensor, budget_s: float = 1.0, warm_l2: bool = False
) -> dict[str, Timing]:
    """Device time of each variant on x's shape and values, by replays of graphs.

    Cold L2 by default; warm_l2 calls again and again on one x. The budget is that of all variants
    together, in equal shares, but each has 7 replays at least.
    """
    inputs = [x] if warm_l2 else rotating_inputs(x)
    pool = torch.cuda.graph_pool_handle()  # shared: the graphs never run side by side
    graphs = {}
    for name, variant in variants.items():
        by_time = math.ceil(MIN_REPLAY_US / _rough_us(variant, x))
        launches = max(len(inputs), min(by_time, MAX_REPEATS))
        graphs[name] = (_capture(variant, inputs, launches, pool), launches)

    def replay(name: str) -> Callable[[], float]:
        """Queues one; the function that is returned gives its microseconds a call, when done."""
        graph, launches = graphs[name]
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        return lambda: _microseconds(start, end) / launches

    for name in graphs:
        replay(name)  # uploads the graph
    first = {name: replay(name) for name in graphs}
    torch.cuda.synchronize()
    replay_s = {name: 1e-6 * us() * graphs[name][1] for name, us in first.items()}
    for _ in range(min(20, int(0.1 / sum(replay_s.values())))):  # warm clocks
        for name in graphs:
            replay(name)
    rounds = interleaved(samples_of(replay_s, budget_s))
    queued = [(name, replay(name)) for due in rounds for name in due]
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for name, us in queued:
        samples[name].append(us())
    return {name: Timing.of(values) for name, values in samples.items()}


# ---------------------------------------------------------------------------- host and CPU time


@torch.no_grad()
def host_times(
    variants: dict[str, Variant], x: Tensor, calls: int = 100, rounds: int = 25
) -> dict[str, Timing]:
    """What the caller's thread spends on a warm call; the device works behind.

    calls launches fit in the driver's queue, so that the host never waits for the device.
    """
    for variant in variants.values():
        for _ in range(20):
            variant(x)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                variant(x)
            samples[name].append(1e6 * (time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return {name: Timing.of(values) for name, values in samples.items()}


@torch.no_grad()
def cpu_times(variants: dict[str, Variant], x: Tensor, budget_s: float = 0.1) -> dict[str, Timing]:
    """Time of a call on the CPU: 3 to 25 of each variant within the budget of all, one before."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant(x)
    end = time.perf_counter() + budget_s
    for done in range(25):
        if done >= 3 and time.perf_counter() > end:
            break
        for name, variant in variants.items():
            began = time.perf_counter()
            variant(x)
            samples[name].append(1e6 * (time.perf_counter() - began))
    return {name: Timing.of(values) for name, values in samples.items()}


# ------------------------------------------------------------------------------------- machine


@dataclass(frozen=True)
class Environment:
    """On what a measurement was made."""

    device: str
    driver: str
    cuda: str
    torch: str
    gnsilu: str
    date: str

    @property
    def short_device(self) -> str:
        """For names of files: h200 of NVIDIA H200; cpu."""
        name = self.device.removeprefix("NVIDIA ") if self.driver else "cpu"
        return re.sub(r"\W+", "_", name.lower())

    def __str__(self) -> str:
        cuda = f"CUDA {self.cuda}, driver {self.driver}, " if self.driver else ""
        return f"{self.device}, {cuda}torch {self.torch}, gnsilu {self.gnsilu}, {self.date}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} (CPU, threads: {torch.get_num_threads()})"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        found = ""
    return found.split("\n")[0].strip() or "unknown"


def environment(device: torch.device) -> Environment:
    on_gpu = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        driver=_driver() if on_gpu else "",
        cuda=(torch.version.cuda or "") if on_gpu else "",
        torch=torch.__version__,
        gnsilu=build_info().version,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )
