"""Types of the compiled module: choosing, the launch tuner and build facts."""

# ruff: noqa: N999 (a compiled module is named so)

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import ClassVar

version: str
cuda_version: str
"""The CUDA toolkit it was built with; empty in a build for the CPU only."""
architectures: tuple[str, ...]
"""What the CUDA kernels were compiled for; empty in a build for the CPU only."""
compiler: str
kernel_version: str
"""Short hash of the kernel sources."""

class DType:
    bfloat16: ClassVar[DType]
    float16: ClassVar[DType]
    float32: ClassVar[DType]
    float64: ClassVar[DType]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Activation:
    none: ClassVar[Activation]
    silu: ClassVar[Activation]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Route:
    __members__: ClassVar[dict[str, Route]]
    fallback: ClassVar[Route]
    three_pass: ClassVar[Route]
    two_pass: ClassVar[Route]
    resident: ClassVar[Route]
    ring: ClassVar[Route]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Problem:
    """What a call asks for, x being [samples, channels, spatial_size].

    Raises:
        ValueError: a negative size, or num_groups does not divide channels.
    """

    def __init__(
        self,
        *,
        samples: int,
        channels: int,
        spatial_size: int,
        num_groups: int,
        x_dtype: DType = ...,
        y_dtype: DType = ...,
        activation: Activation = ...,
        on_cuda: bool = False,
        contiguous: bool = True,
        aligned: bool = True,
        needs_grad: bool = False,
    ) -> None: ...
    @property
    def samples(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def spatial_size(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def x_dtype(self) -> DType: ...
    @property
    def y_dtype(self) -> DType: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def on_cuda(self) -> bool: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def aligned(self) -> bool:
        """x begins at a multiple of 16 bytes."""
    @property
    def needs_grad(self) -> bool: ...

class Device:
    """The facts about a GPU that choosing and tuning depend on."""

    def __init__(
        self,
        *,
        name: str,
        sm_count: int,
        capability_major: int,
        capability_minor: int,
        driver_version: int,
        has_kernel_image: bool = True,
        has_clusters: bool = True,
        shared_memory_per_block: int = 49152,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def capability_major(self) -> int: ...
    @property
    def capability_minor(self) -> int: ...
    @property
    def driver_version(self) -> int: ...
    @property
    def has_kernel_image(self) -> bool: ...
    @property
    def has_clusters(self) -> bool:
        """The kernels were compiled for 9.0 or above."""
    @property
    def shared_memory_per_block(self) -> int: ...

class Config:
    """A launch configuration."""

    def __init__(self, *, threads: int = ..., vectors_in_flight: int = ...) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def vectors_in_flight(self) -> int: ...

class Spans:
    """How a group is cut for its statistics: the size of a span in elements, spans a group."""

    @property
    def size(self) -> int: ...
    @property
    def count(self) -> int: ...

class Plan:
    """How a Problem is computed."""

    @property
    def route(self) -> Route: ...
    @property
    def reason(self) -> str: ...
    @property
    def config(self) -> Config: ...
    @property
    def spans(self) -> Spans: ...
    @property
    def blocks(self) -> int:
        """Blocks that work on a group together, of resident and ring; else 0."""
    @property
    def groups_per_launch(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def bytes_per_element(self) -> float: ...
    @property
    def tunable(self) -> bool: ...

def choose(problem: Problem, device: Device, forced: Route | None = None) -> Plan:
    """The plan for problem on device.

    Raises:
        ValueError: the forced route cannot serve this problem.
    """

def candidates(route: Route) -> list[Config]:
    """The configurations that the tuner times for route, the default first."""

def route_from_name(name: str) -> Route | None: ...
def spans_of(group_size: int) -> Spans: ...

class TunerKey:
    """Everything that a timing depends on."""

    def __init__(
        self,
        *,
        gpu: str,
        sm_count: int,
        driver_version: int,
        kernels: str,
        route: Route,
        channels_per_group: int,
        x_dtype: DType,
        y_dtype: DType,
    ) -> None: ...
    @property
    def gpu(self) -> str: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def driver_version(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    @property
    def route(self) -> Route: ...
    @property
    def channels_per_group(self) -> int: ...
    @property
    def x_dtype(self) -> DType: ...
    @property
    def y_dtype(self) -> DType: ...

def tuner_key(problem: Problem, device: Device, route: Route) -> TunerKey: ...

class Tuner:
    """Times the candidates of a route once per key and remembers the fastest.

    directory: where the files lie, None for memory only. warn: called once per faulty file.
    """

    def __init__(
        self, directory: str | PathLike[str] | None, warn: Callable[[str], None]
    ) -> None: ...
    def find(self, key: TunerKey) -> Config | None: ...
    def tune(
        self,
        key: TunerKey,
        timer: Callable[[Config], float | None],
        budget_seconds: float = 1.0,
    ) -> Config:
        """find(), else the fastest by timer, which gives microseconds or None for a failure.

        An exception of timer ends the tuning and is raised here.
        """

    def clear(self) -> None:
        """Forgets what is in memory; the file stays."""

class TunerEntry:
    """A stored decision; microseconds is the winner's median, made a UTC time in ISO 8601."""

    def __init__(
        self, *, key: TunerKey, config: Config, microseconds: float, made: str
    ) -> None: ...
    @property
    def key(self) -> TunerKey: ...
    @property
    def config(self) -> Config: ...
    @property
    def microseconds(self) -> float: ...
    @property
    def made(self) -> str: ...

class TunerFileContents:
    """The well-formed entries of a file, and why it or a part of it was ignored."""

    @property
    def gpu(self) -> str: ...
    @property
    def entries(self) -> list[TunerEntry]: ...
    @property
    def fault(self) -> str: ...

class RemovedTunerFiles:
    @property
    def paths(self) -> list[Path]: ...
    @property
    def faults(self) -> list[str]: ...

def cache_directory() -> Path | None:
    """Where the tuner's files lie; None where there is no place for them."""

def tuner_file_path(directory: str | PathLike[str], gpu: str) -> Path:
    """The file of a GPU model."""

def tuner_files(directory: str | PathLike[str]) -> list[Path]:
    """The tuner's files in directory, sorted."""

def read_tuner_file(path: str | PathLike[str], gpu: str | None = None) -> TunerFileContents:
    """Never raises; with gpu, a file made for another GPU is a fault."""

def write_tuner_entry(path: str | PathLike[str], entry: TunerEntry) -> str:
    """Adds entry; returns the fault, empty when it is on disk. Never raises."""

def remove_tuner_files(directory: str | PathLike[str]) -> RemovedTunerFiles:
    """Removes the tuner's files in directory and nothing else. Never raises."""
