"""A build without a kernel for the GPU: the fallback and one warning, no error that stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import gnsilu
import pytest
import torch
from fat_binary import device_code, made_for
from gnsilu import _C
from processes import output_of, run_python

OTHER = 121  # a newer architecture than the GPU's: neither machine code nor PTX of it is of use
WARNING = "this build holds no usable kernels for "


def gpu(capability: tuple[int, int], has_kernel_image: bool = True) -> _C.Device:
    return _C.Device(
        name="NVIDIA Invented",
        sm_count=132,
        capability_major=capability[0],
        capability_minor=capability[1],
        driver_version=13000,
        has_kernel_image=has_kernel_image,
    )


def problem(spatial_size: int) -> _C.Problem:
    return _C.Problem(
        samples=1, channels=64, spatial_size=spatial_size, num_groups=32, on_cuda=True
    )


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (
            [gpu((major, minor), False) for major in range(1, 14) for minor in range(10)],
            "this build has no kernel image for the GPU",
        ),
        (
            [gpu((major, minor)) for major in range(1, 8) for minor in range(10) if major < 7]
            + [gpu((7, minor)) for minor in range(5)],
            "the GPU's compute capability is below 7.5",
        ),
    ],
    ids=["no image", "too old"],
)
def test_case_45_a_gpu_without_kernels_takes_the_fallback(
    devices: list[_C.Device], reason: str
) -> None:
    for device in devices:
        for spatial_size in (1, 4096, 2**24 + 1):
            plan = _C.choose(problem(spatial_size), device)
            assert (plan.route, plan.reason) == (_C.Route.fallback, reason)
            assert not plan.tunable
            routes = _C.Route.__members__
            for route in (routes[name] for name in routes if name != "fallback"):
                with pytest.raises(ValueError, match=f"{route.name} is not possible: {reason}"):
                    _C.choose(problem(spatial_size), device, route)


def test_case_45_every_gpu_with_kernels_takes_them() -> None:
    capabilities = [(7, 5), *((major, minor) for major in range(8, 14) for minor in range(10))]
    for capability in capabilities:
        assert _C.choose(problem(4096), gpu(capability)).route != _C.Route.fallback


def package_for(architecture: int, folder: Path) -> None:
    """A copy of the package whose kernels are said to be for that architecture."""
    package = shutil.copytree(Path(gnsilu.__file__).parent, folder / "gnsilu")
    (library,) = (package / "lib").rglob("*gnsilu_kernels.*")
    library.write_bytes(made_for(library.read_bytes(), architecture))
    wanted = {f"sm_{architecture}", f"compute_{architecture}"} if _C.architectures else set()
    assert device_code(library.read_bytes()) == wanted


def test_case_45_a_cpu_does_not_mind_kernels_for_another_gpu(tmp_path: Path) -> None:
    package_for(OTHER, tmp_path)
    output = output_of(
        """
import gnsilu, torch
x = torch.ones(1, 4, 3, 3).bfloat16()
print(gnsilu.__file__, (gnsilu.group_norm_silu(x, 2) == 0).all().item())
""",
        PYTHONPATH=str(tmp_path),
    )
    assert output == f"{tmp_path}/gnsilu/__init__.py True"


ON_A_GPU = """
import os, sys, warnings
warnings.simplefilter("always")
sys.path.append({tests!r})
import gnsilu, torch
from reference import assert_exact

torch.manual_seed(0)
weight, bias = torch.randn(2, 8, device="cuda")
for dtype in (torch.bfloat16, torch.float16):
    for shape in ((2, 8, 33, 33), (1, 8, 640, 480), (3, 8, 1, 1)):
        x = (torch.randn(shape, device="cuda") * 3 + 100).to(dtype)
        y = gnsilu.group_norm_silu(x, 4, weight, bias)
        # An error that stayed would be raised by the operators of the check.
        torch.cuda.synchronize()
        assert_exact(y, x, 4, weight, bias)
explanation = gnsilu.explain(x, 4)
assert explanation.route == "fallback", explanation
assert explanation.reason == "this build has no kernel image for the GPU", explanation
os.environ["GNSILU_ROUTE"] = "three_pass"
try:
    gnsilu.group_norm_silu(x, 4)
except RuntimeError as error:
    assert "three_pass is not possible: this build has no kernel image" in str(error), error
else:
    raise AssertionError("a route without kernels was not refused")
os.environ["GNSILU_ROUTE"] = "auto"
assert torch.equal(gnsilu.group_norm_silu(x, 4, weight, bias), y)
torch.cuda.synchronize()
print(gnsilu.__file__)
"""


@pytest.mark.gpu
def test_case_45_on_a_gpu_without_kernels(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor >= OTHER:
        pytest.skip(f"needs a GPU of a compute capability below {OTHER / 10}")
    package_for(OTHER, tmp_path)
    program = ON_A_GPU.format(tests=str(Path(__file__).parent))
    done = run_python(program, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{tmp_path}/gnsilu/__init__.py"
    assert done.stderr.count(WARNING) == 1, done.stderr
    assert f"{WARNING}{torch.cuda.get_device_name()}" in done.stderr
