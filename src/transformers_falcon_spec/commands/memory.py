"""The peak memory of this process, and of its tensors on devices."""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Return the peak resident size of this process.

    On Linux `ru_maxrss` of a child process starts with the peak of its parent, so `VmHWM` is read there.
    """
    if _STATUS.is_file():
        line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int | None:
    """Return the peak bytes of this process's tensors on all CUDA devices; None without a device."""
    devices = range(torch.cuda.device_count())
    return sum(map(torch.cuda.max_memory_allocated, devices)) if torch.cuda.is_available() else None
