"""What a training run's seconds go to: reading the target, evaluations and checkpoints, and the drafter."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object


class Throughput:
    """Counts tokens and seconds of one process while it trains.

    Args:
        device (`torch.device`): Where work is waited for, so that seconds are counted where they are spent.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_tokens = 0  # of the text, padding left out
        self.seconds = {"run": 0.0, "target": 0.0, "aside": 0.0}
        self._open: list[str] = []  # what is timed now, outermost first

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time spent inside: to the whole `run`, to reading the `target`, or to what is `aside` in a run."""
        counts = what != "aside" or self._open == ["run"]  # neither after the run nor one evaluation inside another
        self._open.append(what)
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self._open.pop()
            self.seconds[what] += counts * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def to_json(self) -> dict[str, float]:
        """Asked by all processes at once.

        Returns:
            `dict[str, float]`: `train_tokens_per_second` of all processes together, evaluations and checkpoints left
                out, and
            `target_share`, the share of that time, on the first process, that the target's layers took; its head,
                through
            which gradients pass, is not in it.
        """
        num_tokens = sum(gather_object([self.num_tokens]))
        train_seconds = max(self.seconds["run"] - self.seconds["aside"], 1e-9)
        return {
            "train_tokens_per_second": num_tokens / train_seconds,
            "target_share": self.seconds["target"] / train_seconds,
        }
