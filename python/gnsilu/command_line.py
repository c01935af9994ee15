"""The command line: `python -m gnsilu info`, `doctor`, `bench` and `cache`."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gnsilu
from gnsilu import _C
from gnsilu.bench import GROUPS, SHAPES, TITLES, Row, measured, save_picture, why_no_picture
from gnsilu.doctor import cache_fault, examine
from gnsilu.timing import environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; a wrong usage exits with 2."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width: tables need not be cut to 80 columns
    status: int = options.run(options, console)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gnsilu",
        description="Shows how gnsilu was built, what it does on this machine and what its launch "
        "tuner has stored.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    cache = commands.add_parser("cache", help="show what the launch tuner has stored, or remove it")
    cache.add_argument("--clear", action="store_true", help="remove the tuner's files")
    cache.set_defaults(run=_cache)
    info = commands.add_parser("info", help="show the build, the GPUs and the routes they take")
    info.set_defaults(run=_info)
    doctor = commands.add_parser("doctor", help="say what works here, and what mends the rest")
    doctor.set_defaults(run=_doctor)
    bench = commands.add_parser("bench", help="time typical shapes beside a copy and PyTorch")
    bench.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    bench.add_argument("--device", type=_device, help="cpu, cuda or cuda:1; by default the GPU")
    bench.add_argument("--compile", action="store_true", help="torch.compile, too: slower to start")
    bench.add_argument(
        "--picture", type=_picture, metavar="FILE.png", help="draw one, by matplotlib"
    )
    bench.set_defaults(run=_bench)
    return parser


def _say(console: Console, text: str) -> None:
    # Not wrapped and not read as markup: paths stay as they are.
    console.print(_printable(text), soft_wrap=True, markup=False)


def _printable(text: str) -> str:
    """Text, some of it out of a file, without what would command the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _cache(options: argparse.Namespace, console: Console) -> int:
    directory = _C.cache_directory()
    if directory is None:
        _say(console, "No cache folder: there is no home folder and GNSILU_CACHE_DIR is not set.")
        _say(console, "The tuner keeps its results in memory only.")
        return 0
    _say(console, f"Cache folder: {directory}")
    if options.clear:
        removed = _C.remove_tuner_files(directory)
        for path in removed.paths:
            _say(console, f"Removed {path}")
        for fault in removed.faults:
            _say(console, f"Could not remove: {fault}")
        if not removed.paths and not removed.faults:
            _say(console, "Nothing to remove.")
        return 1 if removed.faults else 0
    files = _C.tuner_files(directory)
    for path in files:
        contents = _C.read_tuner_file(path)
        _say(console, f"\n{path}")
        if contents.fault:
            _say(console, f"Fault: {contents.fault}. The next tuning replaces it.")
        if contents.entries:
            console.print(_entry_table(contents))
        elif not contents.fault:
            _say(console, "No entries.")
    if not files:
        reason = cache_fault(directory)
        kept = f"None can be kept there: {reason}." if reason else "Empty: nothing has been tuned."
        _say(console, kept)
    return 0


def _entry_table(contents: _C.TunerFileContents) -> Table:
    table = Table(title=escape(_printable(contents.gpu)), title_justify="left")
    for heading in ("route", "channels per group", "x", "y", "configuration", "µs", "SMs"):
        table.add_column(heading)
    for heading in ("CUDA driver", "kernels", "made", "used by this build"):
        table.add_column(heading)
    for entry in contents.entries:
        key = entry.key
        used = key.kernels == _C.kernel_version and entry.config in _C.candidates(key.route)
        cells = (
            key.route.name,
            str(key.channels_per_group),
            key.x_dtype.name,
            key.y_dtype.name,
            str(entry.config),
            f"{entry.microseconds:.1f}",
            str(key.sm_count),
            f"{key.driver_version // 1000}.{key.driver_version % 1000 // 10}",
            key.kernels,
            entry.made,
            "yes" if used else "no",
        )
        table.add_row(*(escape(_printable(cell)) for cell in cells))
    return table


def _doctor(_: argparse.Namespace, console: Console) -> int:
    """1 where something is broken."""
    broken = False
    for finding in examine():
        _say(console, f"{finding.state:<8} {finding.what}")
        if finding.mend:
            _say(console, f"{'':<8}   to mend: {finding.mend}")
        broken |= finding.state == "broken"
    return int(broken)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        if device.type != "cpu":
            torch.cuda.get_device_properties(device)  # fails where there is none of that number
    except (RuntimeError, ValueError, AssertionError) as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    return device


def _picture(text: str) -> Path:
    if why := why_no_picture(Path(text)):
        raise argparse.ArgumentTypeError(why)
    return Path(text)


def _bench(options: argparse.Namespace, console: Console) -> int:
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    caption = str(environment(device))
    caches = ", cold L2" if device.type == "cuda" else ""
    _say(console, f"{caption}; {options.dtype}, {GROUPS} groups{caches}")
    rows: list[Row] = []
    for found in measured(device, getattr(torch, options.dtype), options.compile):
        if isinstance(found, str):
            _say(console, found)
            continue
        rows.append(found)
        _say(console, f"{found.shape}: {found.times['gnsilu'].median:.1f} µs, {found.route}")
    if not rows:
        return 1
    console.print(_bench_table(rows))
    if options.picture is not None:
        save_picture(rows, caption, options.picture)
        _say(console, f"Saved {options.picture}")
    return 0


def _bench_table(rows: list[Row]) -> Table:
    table = Table()
    headings = [TITLES[name] for name in rows[0].times]
    for heading in ("shape", "route", "copy, µs", *headings, "faster than autocast"):
        table.add_column(heading)
    for row in rows:
        ratios = [f"x{row.of_copy(name):.2f}" for name in row.times]
        copy, speedup = f"{row.copy.median:.1f}", f"x{row.speedup:.1f}"
        table.add_row(str(row.shape), row.route, copy, *ratios, speedup)
    return table


def _info(_: argparse.Namespace, console: Console) -> int:
    _say(console, str(gnsilu.build_info()))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        _say(console, "\nNo GPU is visible: every call takes the fallback here.")
        console.print(_route_table("What a GPU of capability 9.0 would take", _choices()))
        return 0
    gpus = Table(title="GPUs", title_justify="left")
    for heading in ("device", "name", "capability", "SMs", "memory"):
        gpus.add_column(heading)
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        gpus.add_row(
            f"cuda:{index}",
            escape(facts.name),
            f"{facts.major}.{facts.minor}",
            str(facts.multi_processor_count),
            f"{facts.total_memory / 2**30:.1f} GiB",
        )
    console.print(gpus)
    for index in range(count):
        console.print(_route_table(f"cuda:{index}", _explanations(torch.device("cuda", index))))
    return 0


def _route_table(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=f"{title}: bfloat16, {GROUPS} groups, no gradient", title_justify="left")
    for heading in ("shape", "route", "reason"):
        table.add_column(heading)
    for shape, (route, reason) in zip(SHAPES, rows, strict=True):
        table.add_row(str(shape), escape(route), escape(reason))
    return table


def _choices() -> Iterator[tuple[str, str]]:
    """Route and reason of the typical shapes on an invented GPU."""
    device = _C.Device(
        name="",
        sm_count=132,
        capability_major=9,
        capability_minor=0,
        driver_version=0,
        shared_memory_per_block=232448,
    )
    for samples, channels, height, width in SHAPES:
        problem = _C.Problem(
            samples=samples,
            channels=channels,
            spatial_size=height * width,
            num_groups=GROUPS,
            on_cuda=True,
        )
        plan = _C.choose(problem, device)
        yield plan.route.name, plan.reason


def _explanations(device: torch.device) -> Iterator[tuple[str, str]]:
    """Route and reason of the typical shapes on a GPU that is there."""
    for shape in SHAPES:
        try:
            explanation = gnsilu.explain(
                torch.empty(shape, dtype=torch.bfloat16, device=device), GROUPS
            )
        except torch.OutOfMemoryError:
            yield "-", "not enough free memory for x"
        except RuntimeError as error:  # GNSILU_ROUTE names one that cannot serve this shape
            yield "-", str(error).splitlines()[0]
        else:
            yield explanation.route, explanation.reason
