"""Peak memory of one method, in a process of its own: peaks of several in one could not be told apart."""

import json
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """Most bytes in use at a time.

    Args:
        num_bytes (`int`): Of the whole process: Python, torch and the allocator's reserve too.
        num_device_bytes (`int`, *optional*): In tensors on CUDA devices, all together; None without one.
        num_weight_bytes (`int`): What the weights of drafter or assistant take of it.
    """

    num_bytes: int
    num_device_bytes: int | None
    num_weight_bytes: int


@dataclass(frozen=True)
class MemoryRun:
    """What a process does before its peak is read: it loads a target and a method, and writes greedy texts.

    Args:
        target (`str`): Folder or Hub name of the target.
        source (`str`, *optional*): A method as `--methods` names it; None is the target alone.
        prompts (`list[str]`): Prompt files.
        limit (`int`): Texts to write of each file; 0 writes none.
        max_new_tokens (`int`): Most tokens of a text.
        dtype (`str`): Type of the models.
        device (`str`): Where they are.
        threads (`int`): CPU threads.
        draft_tree (`str`, *optional*): File of the static tree that a drafter of this package is to draft.
    """

    target: str
    source: str | None
    prompts: list[str]
    limit: int
    max_new_tokens: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    draft_tree: str | None = None

    def measure(self) -> Peak:
        """Do it in a fresh process."""
        command = [sys.executable, "-m", __name__, json.dumps(asdict(self))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip() or "it said nothing").split("\n")[-1]
            kind = ProcessKilledError if result.returncode < 0 else BenchmarkError
            raise kind(
                f"The process that measures the memory of `{self.source or 'the target alone'}` must end with 0, but "
                f"it ended with {_ending(result.returncode)}: {last}. Run `{' '.join(command[:3])} '{command[3]}'` to "
                "see all of it."
            )
        return Peak(**json.loads(result.stdout.strip().split("\n")[-1]))

    def run_here(self) -> Peak:
        """Do it in this process, which should do nothing else."""
        torch.set_num_threads(self.threads)
        target, tokenizer = load_target(self.target, self.dtype, self.device)
        method = MethodEntry.parse(self.source).load(target, self.draft_tree) if self.source else target_alone()
        for prompt in read_prompts(self.prompts, self.limit) if self.limit else []:
            ids = prompt.input_ids(tokenizer)
            with method.path(target):
                options = decoding_options("greedy")
                timed_generate(target, ids, self.max_new_tokens, options, 0, **method.arguments())
        weights = list(method.assistant.parameters()) if method.assistant is not None else []
        return Peak(peak_resident_bytes(), peak_device_bytes(), sum(w.numel() * w.element_size() for w in weights))


def _ending(status: int) -> str:
    """An exit status in words; a signal's name where one ended the process."""
    return str(status) if status >= 0 else f"the signal {signal.Signals(-status).name}"


def peak_resident_bytes() -> int:
    """The largest resident size that this process had.

    Linux hands `ru_maxrss` of a parent down to the program that its child starts, so a small child of a large parent
    would report the parent's peak; `VmHWM` is the program's own.
    """
    if _STATUS.is_file():
        line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int | None:
    """The most bytes of this process's tensors on CUDA devices, all together; None without one."""
    devices = range(torch.cuda.device_count())
    return sum(map(torch.cuda.max_memory_allocated, devices)) if torch.cuda.is_available() else None


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(json.dumps(asdict(MemoryRun(**json.loads(sys.argv[1])).run_here())))
