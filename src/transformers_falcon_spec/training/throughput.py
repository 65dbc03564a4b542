"""Training speed in tokens a second, and the share of the time that reading the target takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object


class Throughput:
    """Counts the tokens and seconds of one process, whose device is synchronised, while it trains."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_tokens = 0  # without padding
        self.seconds = {"run": 0.0, "target": 0.0, "pause": 0.0}
        self._open: list[str] = []  # parts that are being timed, outermost first

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a part: the `run`, reading the `target`, or a `pause` of the run for an evaluation or a checkpoint."""
        counts = self._open == ([] if part == "run" else ["run"])  # not after the run, and not inside a pause
        self._open.append(part)
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._open.pop()
            self.seconds[part] += counts * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def to_json(self) -> dict[str, float]:
        """The speed for `training.json`; all processes must call this together.

        `train_tokens_per_second` is that of all processes, without evaluations and checkpoints. `target_share` is the
        share of this time that the target's layers took on the first process, without its head, which gradients pass.
        """
        num_tokens = sum(gather_object([self.num_tokens]))
        train_seconds = max(self.seconds["run"] - self.seconds["pause"], 1e-9)
        return {
            "train_tokens_per_second": num_tokens / train_seconds,
            "target_share": self.seconds["target"] / train_seconds,
        }
