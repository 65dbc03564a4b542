"""Work repeated as a captured graph repeats it: the operations of one run, on the same tensors, without Python."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Inside, operations run and are recorded; `replay` repeats them at the addresses that they had."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, results))
        return results

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
