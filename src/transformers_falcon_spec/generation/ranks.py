"""Processes that make one call of `generate` together: what the first of them drafts and decides holds for all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.verification import Verdict
from ..errors import OptionError, RankError
from .candidates import Draft

Value = TypeVar("Value")


class Ranks:
    """One process alone, which nobody tells anything: what all calls need that are not spread over processes."""

    num, rank = 1, 0
    num_gathers = 0
    num_gathered_bytes = 0  # that this process received from the others

    @property
    def is_first(self) -> bool:
        """Whether this is the process whose drafts and verdicts hold."""
        return self.rank == 0

    def told(self, value: Value) -> Value:
        """What the first rank has for `value`; a plain object, without tensors of a device."""
        return value

    def gathered(self, part: Tensor) -> Tensor:
        """`[ranks * parts, ...]` of what each rank holds, `[parts, ...]`, in their order."""
        return part

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that differ in what they must have in common; `facts` are plain objects by name."""

    def share(self, draft: Draft) -> Draft:
        """The first rank's tokens and tree; all that goes with them stays each rank's own, for nobody else judges by it."""
        if self.num == 1:
            return draft
        token_ids, parents = self.told((draft.token_ids.tolist(), draft.parents.tolist()))
        place = draft.token_ids.device
        return replace(
            draft, token_ids=torch.tensor(token_ids, device=place), parents=torch.tensor(parents, device=place)
        )


class SpreadRanks(Ranks):
    """All processes of `torch.distributed`, on which this is one. Every one of them must make one.

    Args:
        timeout_seconds (`float`): How long a rank waits for the others.

    Raises:
        [`OptionError`]: `torch.distributed` does not run.
    """

    def __init__(self, timeout_seconds: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                '`backend="distributed"` needs processes that know of each other, but `torch.distributed` does not run here. Start '
                "the program with `torchrun` and load the target over all of them, or call `torch.distributed.init_process_group()`."
            )
        self.num, self.rank = dist.get_world_size(), dist.get_rank()
        timeout = timedelta(seconds=timeout_seconds)
        self._states = dist.new_group(timeout=timeout)
        self._words = dist.new_group(backend="gloo", timeout=timeout)  # needs no device to talk of plain objects

    def told(self, value: Value) -> Value:
        """What the first rank has for `value`.

        Raises:
            [`RankError`]: the others did not answer.
        """
        values = [value]
        with self._together("word of the first rank"):
            dist.broadcast_object_list(values, src=0, group=self._words)
        return values[0]

    def gathered(self, part: Tensor) -> Tensor:
        """The parts of all ranks, in their order.

        Raises:
            [`RankError`]: the others did not answer.
        """
        self.num_gathers += 1
        self.num_gathered_bytes += (self.num - 1) * part.nbytes
        parts = part.new_empty(self.num * len(part), *part.shape[1:])
        with self._together("the states that others compute"):
            dist.all_gather(list(parts.chunk(self.num)), part.contiguous(), group=self._states)
        return parts

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that differ.

        Raises:
            [`RankError`]: they do, or did not answer.
        """
        found: list[Any] = [None] * self.num
        with self._together("the others to begin"):
            dist.all_gather_object(found, dict(facts), group=self._words)
        for name in facts:
            values = [theirs.get(name) for theirs in found]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                raise RankError(
                    f"All ranks must have the same {name}, but rank 0 has {values[0]!s:.80} and rank {different[0]} "
                    f"{values[different[0]]!s:.80}. Run the same program with the same files and arguments on each."
                )

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"All {self.num} ranks must take part in the call until it ends, but rank {self.rank} waited in vain for {what}: another "
                f"one has died, stands still or makes another call ({str(error).splitlines()[0]:.200}). See what the others say, "
                "and start all of them again."
            ) from error


ALONE = Ranks()


@dataclass(frozen=True)
class Decision:
    """What the first rank decided in a step."""

    verdicts: list[Verdict]
    num_unclear: int  # as `Judge` counts them
    is_complete: list[bool]  # of each row
    draws: list[Any]  # where each row's draws go on; empty where nothing is drawn


@runtime_checkable
class JoiningDrafter(Protocol):
    """A drafter that may compute on several ranks."""

    def join(self) -> Ranks:
        """The ranks on which it does, once all of them have come."""
        ...


def named_options(config: Any) -> dict[str, Any]:
    """The fields of a configuration, as facts that ranks compare."""
    return {f"`{name}`": str(value) for name, value in config.to_dict().items() if not name.startswith("_")}


def ranks_of(drafter: Any) -> Ranks:
    """The ranks on which a drafter computes; this one alone unless it says otherwise."""
    return drafter.join() if isinstance(drafter, JoiningDrafter) else ALONE
