"""Many calls leave nothing in the model, and their graphs are counted."""

from pathlib import Path

import torch

from benchmarks.on_gpu.cells import EMBEDDED
from benchmarks.on_gpu.many_calls import mixed_calls
from benchmarks.on_gpu.pairs import Pair
from tests.benchmarks.on_gpu.tiny_pair import models
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.tiny import make_prompt

__all__ = ["fake_cuda", "models"]
CPU = torch.device("cpu")


def test_many_calls_leave_nothing_in_the_model(models: Path, fake_cuda: type[FakeGraph]) -> None:
    pair = Pair(models, None, "small", None, torch.float32, CPU)
    prompts = [make_prompt(length, seed=length) for length in (5, 9, 12, 17)]
    pair._drafters["lookahead"] = pair.drafter(EMBEDDED)

    parts = [*mixed_calls(pair, prompts, 4)]

    assert [part["num_calls"] for part in parts] == [1, 2, 3, 4]
    assert [len(part["samples"]) for part in parts] == [1, 2, 3, 4]
    assert [part["is_complete"] for part in parts] == [False, False, False, True]
    assert parts[-1]["left_in_model"] == []
    assert parts[-1]["num_captures"] == fake_cuda.made > 0
