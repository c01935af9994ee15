"""Prints what the build has to know of the interpreter's PyTorch, one `name=value` a line."""

import sysconfig
from pathlib import Path

import torch

package = Path(torch.__file__).parent
site_packages = Path(sysconfig.get_path("purelib"))
# NVIDIA's wheels lie beside torch, which may be elsewhere than this environment's own packages.
nvidia = [folder for base in (package.parent, site_packages) for folder in base.glob("nvidia/cu1*")]

facts = {
    "VERSION": torch.__version__,
    "CUDA_VERSION": torch.version.cuda or "",
    "CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    "INCLUDE_DIRS": ";".join(
        str(package / folder) for folder in ("include", "include/torch/csrc/api/include")
    ),
    "LIBRARY_DIR": package / "lib",
    "NVIDIA_DIRS": ";".join(dict.fromkeys(map(str, nvidia))),
}
for name, value in facts.items():
    print(f"{name}={value}")
