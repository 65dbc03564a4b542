"""Measuring the peak memory of one method in a process of its own, because a process has one peak."""

import json
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from ..errors import BenchmarkError, ProcessKilledError
from ..evaluation.decoding import decoding_options
from ..evaluation.methods import target_alone
from ..evaluation.prompts import read_prompts
from ..generation.timed import timed_generate
from .loading import load_target
from .methods import MethodEntry

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Peak:
    """The peak memory of a process, under the names of results files."""

    peak_bytes: int  # the whole process, with Python, torch and the reserve of the allocator
    peak_device_bytes: int | None  # tensors on all CUDA devices; None without a device
    weight_bytes: int  # the weights of the drafter or assistant


@dataclass(frozen=True)
class MemoryRun:
    """The work of a process whose peak is measured: it loads a target and a method, and writes greedy texts."""

    target: str
    source: str | None  # the method, as in `--methods`; None is the target alone
    prompts: list[str]
    limit: int  # texts to write for each file
    max_new_tokens: int = 128
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    draft_tree: str | None = None
    step: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def measure(self) -> Peak:
        """Do the work in a fresh process, and return its peak."""
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip() or "it said nothing").split("\n")[-1]
            is_killed = result.returncode < 0
            status = f"the signal {signal.Signals(-result.returncode).name}" if is_killed else result.returncode
            raise (ProcessKilledError if is_killed else BenchmarkError)(
                f"The process that measures the memory of `{self.source or 'the target alone'}` must end with 0, but "
                f"it ended with {status}: {last}. Run "
                f"`{' '.join(command[:3])} '{command[3]}'` to see all of it."
            )
        return Peak(**json.loads(result.stdout.strip().split("\n")[-1]))

    def run_here(self) -> Peak:
        """Do the work in this process, which should do nothing else."""
        torch.set_num_threads(self.threads)
        target, tokenizer = load_target(self.target, self.dtype, self.device)
        entry = MethodEntry.parse(self.source) if self.source else None
        method = entry.load(target, self.draft_tree, self.step) if entry else target_alone()
        for prompt in read_prompts(self.prompts, self.limit, self.template_kwargs) if self.limit else []:
            ids = prompt.input_ids(tokenizer)
            with method.path(target):
                options = decoding_options("greedy")
                timed_generate(target, ids, self.max_new_tokens, options, 0, **method.arguments())
        weights = list(method.assistant.parameters()) if method.assistant is not None else []
        return Peak(peak_resident_bytes(), peak_device_bytes(), sum(weight.nbytes for weight in weights))


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


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(json.dumps(asdict(MemoryRun(**json.loads(sys.argv[1])).run_here())))
