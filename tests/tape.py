"""Work repeated as a captured graph repeats it: the operations of one run, on the same tensors, without Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformers_falcon_spec.generation.capture import graph

ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


def is_kernel(func: Any) -> bool:
    """Whether an operation computes or writes something, as about one kernel on CUDA: no view, and no allocation."""
    name = func._schema.name.split("::")[1]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return not is_view and name not in ALLOCATING


class Tape(TorchDispatchMode):
    """Inside, operations run and are recorded; `replay` repeats them at the addresses that they had."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, results))
        return results

    @property
    def num_kernels(self) -> int:
        """Operations that a graph of the work would do on the device."""
        return sum(is_kernel(func) for func, *_ in self._operations)

    @torch.inference_mode()  # in which tensors of both kinds may be written to, as a graph does
    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(work: Callable[[], object]) -> Callable[[], None]:
    """Run `work` once; what is returned repeats it as a replay of a captured graph would."""
    tape = Tape()
    with tape:
        work()
    return tape.replay


def install(patch: pytest.MonkeyPatch) -> list[object]:
    """Let all repeated work go through a tape, warmed up as on CUDA; returns a list that grows with every tape."""
    tapes: list[object] = []

    def capture(_device: Any, warm_up: graph.Work, work: graph.Work, _pool: Any) -> graph.Work:
        for _ in range(graph.NUM_WARM_UPS):
            warm_up()
        replay, num_calls = taped(work), 0  # recording runs the work, a capture does not
        tapes.append(replay)

        def run() -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                replay()

        return run

    patch.setattr(graph, "is_captured", lambda _device: True)
    patch.setattr(graph, "capture", capture)
    patch.setattr(graph.RepeatedWork, "replay_seconds", lambda _work: 1.0)  # a CPU has no events
    return tapes
