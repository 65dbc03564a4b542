"""Several processes make one call of `generate` together; the first one drafts and decides for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..core.sampling import private_generator
from ..core.verification import AcceptedPath
from ..errors import DistributedError, OptionError
from ..provenance import weights_fingerprint
from .drafting import Draft, DraftBudget, Prices

Value = TypeVar("Value")
DATA_PARALLEL = ("dp", "fsdp", "ddp", "data")  # how dimensions of a mesh begin whose processes read different prompts


class Processes:
    """The processes that make a call together. This base class is a single process, which sends nothing."""

    num, process_rank = 1, 0

    @property
    def is_first(self) -> bool:
        """Whether this process drafts and decides for the others."""
        return self.process_rank == 0

    def broadcast(self, value: Value) -> Value:
        """The `value` of the first process. It must be a plain object, without tensors on a device."""
        return value

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts `[parts, ...]` of all processes, in their order, as one tensor `[processes * parts, ...]`."""
        return part

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise an error if processes differ in one of `facts`, plain objects by name."""

    def draft_rng(self, prompts: Tensor, config: Any) -> torch.Generator:
        """The generator of drafts, the same in all processes, which must have the same prompts and options."""
        rng = private_generator()
        if self.num > 1:
            self.check_same({"prompts": prompts.tolist(), **named_options(config)})
            rng.set_state(self.broadcast(rng.get_state()))
        return rng

    def limited(self, limited: DraftBudget | None, full: DraftBudget) -> DraftBudget | None:
        """The budget of the first process, None for a plain step, with the noise of this process's `full` budget."""
        sent = self.broadcast(None if limited is None else replace(limited, noise=None))
        if sent is None:
            return None
        prices = None if sent.prices is None else AgreedPrices(**vars(sent.prices), processes=self)
        return replace(sent, noise=full.noise, prices=prices)

    def broadcast_draft(self, draft: Draft | None, device: torch.device) -> Draft | None:
        """The draft of the first process, on `device`, without `draft_probs`, as only the first process accepts."""
        sent = self.broadcast(None if draft is None else _moved(draft, torch.device("cpu")))
        return draft if self.is_first or sent is None else _moved(sent, device)


def _moved(draft: Draft, device: torch.device) -> Draft:
    parts = {name: getattr(draft, name) for name in ("token_ids", "parents", "is_lookahead")}
    moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in parts.items()}
    return Draft(**moved, num_passes=draft.num_passes)


@dataclass(frozen=True)
class AgreedPrices(Prices):
    """Prices by which the first process decides for all, so that all of them make the same passes."""

    processes: Processes

    def pays(self, number: int, expected_tokens: float) -> bool:
        """Whether the first process expects pass `number` to pay."""
        return self.processes.broadcast(super().pays(number, expected_tokens))


class ProcessGroup(Processes):
    """The processes of `torch.distributed` that make a call together; each of them must create this object."""

    def __init__(self, timeout_seconds: float | None = None, members: Sequence[int] | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                '`backend="distributed"` needs processes that know of each other, but `torch.distributed` does not '
                "run here. Start the program with `torchrun` and load the target over all of them, or call "
                "`torch.distributed.init_process_group()`."
            )

        members = list(range(dist.get_world_size()) if members is None else members)
        self.num, self.process_rank, self._first = len(members), members.index(dist.get_rank()), members[0]
        timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._tensors, self._objects = (  # plain objects need no device; only members take part in making the groups
            dist.new_group(members, timeout, backend, use_local_synchronization=True) for backend in (None, "gloo")
        )

    def broadcast(self, value: Value) -> Value:
        """The `value` of the first process."""
        values = [value]
        with self._together("an object of the first process"):
            dist.broadcast_object_list(values, src=self._first, group=self._objects)
        return values[0]

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all processes."""
        parts = part.new_empty(self.num * len(part), *part.shape[1:])
        with self._together("the tensors that others compute"):
            dist.all_gather(list(parts.chunk(self.num)), part.contiguous(), group=self._tensors)
        return parts

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raise an error if processes differ in one of `facts`, or did not answer."""
        of_all: list[Any] = [None] * self.num
        with self._together("the others to begin"):
            dist.all_gather_object(of_all, dict(facts), group=self._objects)

        for name in facts:
            values = [each.get(name) for each in of_all]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                raise DistributedError(
                    f"All processes must have the same {name}, but process 0 has {values[0]!s:.80} and process "
                    f"{different[0]} {values[different[0]]!s:.80}. Run the same program with the same files and "
                    "arguments on each."
                )

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"All {self.num} processes must take part in the call until it ends, but process {self.process_rank} "
                f"waited in vain for {what}: another one has died, stands still or makes another call "
                f"({str(error).splitlines()[0]:.200}). See what the others say, and start all of them again."
            ) from error


SINGLE_PROCESS = Processes()


@dataclass(frozen=True)
class Decision:
    """What the first process decided in a step."""

    paths: list[AcceptedPath] = field(default_factory=list)  # that became text, of each row
    has_ended: list[bool] = field(default_factory=list)  # of each row, by its stopping criteria
    draws: list[Any] = field(default_factory=list)  # the state of each row's draws; empty where nothing is drawn


def named_options(config: Any) -> dict[str, Any]:
    """The fields of a configuration, in the form that [`Processes.check_same`] compares."""
    return {f"`{name}`": str(value) for name, value in config.to_dict().items() if not name.startswith("_")}


_OF_TARGETS: WeakKeyDictionary[PreTrainedModel, ProcessGroup] = WeakKeyDictionary()


def processes_of(drafter: Any, target: PreTrainedModel) -> Processes:
    """The processes that share the drafter, or else the target; this process alone if neither is shared.

    A drafter whose model may be spread has a method `join`, which waits until all of its processes have called it.
    """
    processes: Processes = drafter.join() if hasattr(drafter, "join") else SINGLE_PROCESS
    members = _holders(target) if processes.num == 1 else []
    if len(members) <= 1:
        return processes

    if target not in _OF_TARGETS:
        _OF_TARGETS[target] = ProcessGroup(members=members)
    processes = _OF_TARGETS[target]
    weights = weights_fingerprint(drafter) if isinstance(drafter, nn.Module) else None
    options = {**named_options(drafter.config), **named_options(drafter.generation_config)}
    processes.check_same({"drafter weights": weights, **options})
    return processes


def _holders(target: PreTrainedModel) -> list[int]:
    """The ranks of the processes that each hold a part of the target, without those that read other prompts."""
    if not dist.is_available() or not dist.is_initialized():
        return []

    mesh: Any = getattr(target, "_device_mesh", None)
    if mesh is None and not any(isinstance(module, FSDPModule) for module in target.modules()):
        mesh = next((weight.device_mesh for weight in target.parameters() if isinstance(weight, DTensor)), None)
    if mesh is not None and mesh.mesh_dim_names is not None:
        names = tuple(name for name in mesh.mesh_dim_names if not name.startswith(DATA_PARALLEL))
        mesh = mesh[names] if names else None
    return [] if mesh is None else mesh.mesh.flatten().tolist()
