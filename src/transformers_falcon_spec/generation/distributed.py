"""Several processes make one call of `generate` together; the first one drafts and decides for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..core.verification import AcceptedPath
from ..errors import DistributedError, OptionError
from ..provenance import weights_fingerprint
from .drafting import Draft, DraftBudget, Prices

Value = TypeVar("Value")
DATA_PARALLEL = ("dp", "fsdp", "ddp", "data")  # how dimensions of a mesh begin whose processes read different prompts


class Processes:
    """The processes that make a call. This base class stands for a single process, which has nobody to talk to."""

    num, process_rank = 1, 0
    num_gathers = 0
    num_gathered_bytes = 0  # that this process received from the others

    @property
    def is_first(self) -> bool:
        """Whether this process drafts and decides for the others."""
        return self.process_rank == 0

    def broadcast(self, value: Value) -> Value:
        """The `value` of the first process. It must be a plain object, without tensors on a device."""
        return value

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts `[parts, ...]` of all processes as one tensor `[processes * parts, ...]`, in the order of the processes."""
        return part

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise an error if processes differ in one of `facts`, plain objects by name."""

    def limited(self, limited: DraftBudget | None, full: DraftBudget) -> DraftBudget | None:
        """The budget that the first process chose, or None for a plain step; the noise is that of this process's `full` budget."""
        if self.num == 1:
            return limited
        said = None if limited is None else (limited.num_nodes, limited.num_passes, limited.drafter, limited.prices)
        limits = self.broadcast(said)
        if limits is None:
            return None
        num_nodes, num_passes, drafter, prices = limits
        agreed = None if prices is None else AgreedPrices(**vars(prices), processes=self)
        return replace(full, num_nodes=num_nodes, num_passes=num_passes, drafter=drafter, prices=agreed)

    def broadcast_draft(self, draft: Draft | None, device: torch.device) -> Draft | None:
        """The draft of the first process, on `device`. Its `draft_probs` are not sent, as only the first process verifies."""
        if self.num == 1:
            return draft
        said = None
        if draft is not None:
            parts = (draft.token_ids, draft.parents, draft.is_lookahead, draft.node_probs)
            said = ([part if part is None else part.cpu() for part in parts], draft.num_passes)
        said = self.broadcast(said)
        if self.is_first or said is None:
            return draft if self.is_first else None
        (token_ids, parents, is_lookahead, node_probs), num_passes = said
        assert token_ids is not None  # the others may be missing, but not the parents
        assert parents is not None
        return Draft(
            token_ids.to(device),
            parents.to(device),
            is_lookahead=is_lookahead if is_lookahead is None else is_lookahead.to(device),
            num_passes=num_passes,
            node_probs=node_probs,
        )


@dataclass(frozen=True)
class AgreedPrices(Prices):
    """Prices by which the first process decides for all, so that all of them make the same passes."""

    processes: Processes

    def pays(self, number: int, expected_tokens: float) -> bool:
        """Whether the first process expects pass `number` to pay."""
        return self.processes.broadcast(super().pays(number, expected_tokens))


class ProcessGroup(Processes):
    """The processes of `torch.distributed` that make a call together; each of them must create this object.

    Args:
        timeout_seconds (`float`, *optional*): How long a rank waits for the others; None is as long as `torch.distributed` does.
        members (`Sequence[int]`, *optional*): Their numbers among all processes; None is all of them.

    Raises:
        [`OptionError`]: `torch.distributed` does not run.
    """

    def __init__(self, timeout_seconds: float | None = None, members: Sequence[int] | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                '`backend="distributed"` needs processes that know of each other, but `torch.distributed` does not run here. Start '
                "the program with `torchrun` and load the target over all of them, or call `torch.distributed.init_process_group()`."
            )
        members = list(range(dist.get_world_size()) if members is None else members)
        self.num, self.process_rank, self._first = len(members), members.index(dist.get_rank()), members[0]
        timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._states, self._words = (  # plain objects need no device; processes that are no members do not take part
            dist.new_group(members, timeout, backend, use_local_synchronization=True) for backend in (None, "gloo")
        )

    def broadcast(self, value: Value) -> Value:
        """The `value` of the first process.

        Raises:
            [`DistributedError`]: the others did not answer.
        """
        values = [value]
        with self._together("word of the first rank"):
            dist.broadcast_object_list(values, src=self._first, group=self._words)
        return values[0]

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all processes, in their order.

        Raises:
            [`DistributedError`]: the others did not answer.
        """
        self.num_gathers += 1
        self.num_gathered_bytes += (self.num - 1) * part.nbytes
        parts = part.new_empty(self.num * len(part), *part.shape[1:])
        with self._together("the states that others compute"):
            dist.all_gather(list(parts.chunk(self.num)), part.contiguous(), group=self._states)
        return parts

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise an error if processes differ in one of `facts`.

        Raises:
            [`DistributedError`]: they do, or did not answer.
        """
        found: list[Any] = [None] * self.num
        with self._together("the others to begin"):
            dist.all_gather_object(found, dict(facts), group=self._words)
        for name in facts:
            values = [theirs.get(name) for theirs in found]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                raise DistributedError(
                    f"All ranks must have the same {name}, but rank 0 has {values[0]!s:.80} and rank {different[0]} "
                    f"{values[different[0]]!s:.80}. Run the same program with the same files and arguments on each."
                )

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"All {self.num} ranks must take part in the call until it ends, but rank {self.process_rank} waited in vain for {what}: another "
                f"one has died, stands still or makes another call ({str(error).splitlines()[0]:.200}). See what the others say, "
                "and start all of them again."
            ) from error


SINGLE_PROCESS = Processes()


@dataclass(frozen=True)
class Decision:
    """What the first process decided in a step."""

    paths: list[AcceptedPath] = field(default_factory=list)  # that became text, of each row
    is_complete: list[bool] = field(default_factory=list)  # of each row
    draws: list[Any] = field(default_factory=list)  # the state of each row's draws; empty where nothing is drawn


@runtime_checkable
class JoiningDrafter(Protocol):
    """A drafter whose model may be spread over several processes."""

    def join(self) -> Processes:
        """The processes over which it is spread; waits until all of them have called this."""
        ...


def named_options(config: Any) -> dict[str, Any]:
    """The fields of a configuration by name, as [`Processes.check_same`] takes them."""
    return {f"`{name}`": str(value) for name, value in config.to_dict().items() if not name.startswith("_")}


_OF_TARGETS: WeakKeyDictionary[PreTrainedModel, ProcessGroup] = WeakKeyDictionary()


def processes_of(drafter: Any, target: PreTrainedModel) -> Processes:
    """The processes over which the drafter is spread, else those over which the target is; this one alone if there are none.

    Raises:
        [`DistributedError`]: the ranks have other drafters or options, or one of them did not come.
    """
    processes = drafter.join() if isinstance(drafter, JoiningDrafter) else SINGLE_PROCESS
    members = _holders(target) if processes.num == 1 else []
    if len(members) <= 1:
        return processes
    if target not in _OF_TARGETS:
        _OF_TARGETS[target] = ProcessGroup(members=members)
    processes = _OF_TARGETS[target]
    for member in drafter.members:
        weights = weights_fingerprint(member) if isinstance(member, nn.Module) else None
        options = {**named_options(member.config), **named_options(member.generation_config)}
        processes.check_same({"drafter weights": weights, **options})
    return processes


def _holders(target: PreTrainedModel) -> list[int]:
    """The numbers of the processes that each hold a part of the target; processes that read other prompts are left out."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    mesh: Any = getattr(target, "_device_mesh", None)
    if mesh is None and not any(isinstance(module, FSDPModule) for module in target.modules()):
        mesh = next((weight.device_mesh for weight in target.parameters() if isinstance(weight, DTensor)), None)
    if mesh is None:
        return []
    if mesh.mesh_dim_names is not None:
        names = tuple(name for name in mesh.mesh_dim_names if not name.startswith(DATA_PARALLEL))
        mesh = mesh[names] if names else None
    return [] if mesh is None else mesh.mesh.flatten().tolist()
