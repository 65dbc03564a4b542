"""Builds and registers the device guard without which a CPU build of PyTorch makes no tensor that says it lies on CUDA."""

import ctypes
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("guard.cpp")


@lru_cache
def why_no_guard() -> str | None:
    """Why the guard could not be registered in this process, in words; None if it was."""
    compiler = shutil.which("g++")
    if torch.cuda.is_available():
        return "there is a real CUDA device"
    if compiler is None:
        return "`g++` is not installed"

    library = Path(mkdtemp()) / "guard.so"
    places = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    asked = [compiler, "-shared", "-fPIC", "-std=c++20", abi, *places, str(SOURCE), "-lc10", "-o", str(library)]
    built = subprocess.run(asked, capture_output=True, text=True, check=False)
    if built.returncode:
        return f"the guard cannot be built: {built.stderr.strip().splitlines()[-1]}"

    ctypes.CDLL(str(library)).register_guard()
    return None
