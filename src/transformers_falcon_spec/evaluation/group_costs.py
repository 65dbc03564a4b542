"""What drafting with EasySpec would take on several devices: parts timed on one, links measured or given, the rest is arithmetic."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..drafters.easyspec import LayerParallelDrafter
from ..drafters.easyspec.backends import SequentialBackend
from ..drafters.easyspec.distributed import layers_of_rank
from ..generation.distributed import Processes
from ..generation.timed import synchronize
from .group_fit import Steps

MOST_RANKS = 8
NUM_BROADCASTS = (
    4  # of a step: its draft and its verdict, each of them first its length; too short for bandwidth to count
)
LINK_BYTES = (1 << 10, 1 << 24)  # of the two messages that tell latency from bandwidth


@dataclass(frozen=True)
class Link:
    """The time that moving data between two devices takes.

    Args:
        latency_seconds (`float`): For the first byte.
        bytes_per_second (`float`): After it.
    """

    latency_seconds: float
    bytes_per_second: float

    def gather_seconds(self, num_ranks: int, num_bytes: float) -> float:
        """All ranks get all parts of `num_bytes` each, which go round a ring: one hop less than there are ranks."""
        return (num_ranks - 1) * (self.latency_seconds + num_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Costs:
    """Seconds of parts of drafting, on one device.

    Args:
        attend (`float`): Attention of one layer in a drafted pass.
        finish (`float`): The rest of that layer.
        layer (`float`): A whole layer that stands alone, there.
        ends (`float`): Everything else there: embedding, masks, last norm and head.
        read (`float`): The exact pass that a step begins with.
        state_bytes (`int`): What attention of one layer gives in a drafted pass.
    """

    attend: float
    finish: float
    layer: float
    ends: float
    read: float
    state_bytes: int


def pass_traffic(groups: Sequence[Sequence[int]], num_ranks: int, state_bytes: int) -> tuple[int, int]:
    """Exchanges of one drafted pass, and the bytes that each rank receives in it."""
    sizes = [len(group) for group in groups if len(group) > 1]
    num_parts = sum(layers_of_rank(size, num_ranks) for size in sizes)
    return (len(sizes), (num_ranks - 1) * num_parts * state_bytes) if num_ranks > 1 else (0, 0)


def pass_seconds(groups: Sequence[Sequence[int]], num_ranks: int, costs: Costs, link: Link | None) -> float:
    """One drafted pass on so many ranks, which must have a link if there are several."""
    seconds = costs.ends
    for group in groups:
        if len(group) == 1:
            seconds += costs.layer
            continue
        num_own = layers_of_rank(len(group), num_ranks)
        seconds += num_own * costs.attend + len(group) * costs.finish
        if num_ranks > 1:
            assert link is not None  # said above
            seconds += link.gather_seconds(num_ranks, num_own * costs.state_bytes)
    return seconds


@dataclass(frozen=True)
class StepModel:
    """The time that an average step takes.

    Args:
        costs ([`Costs`]): Of drafting.
        elsewhere (`float`): Seconds of a step that are not drafting passes, the target's forward above all.
        link ([`Link`], *optional*): Between devices, if several are asked about.
    """

    costs: Costs
    elsewhere: float
    link: Link | None

    def draft_seconds(self, groups: Sequence[Sequence[int]], steps: Steps, num_ranks: int) -> float:
        """Drafting passes of a step: an exact one where it drafts, and the rough ones."""
        num_rough = steps.num_passes - steps.num_drafts
        rough = pass_seconds(groups, num_ranks, self.costs, self.link)
        return (steps.num_drafts * self.costs.read + num_rough * rough) / max(steps.num_steps, 1)

    def on_devices(self, groups: Sequence[Sequence[int]], steps: Steps) -> list[dict[str, Any]]:
        """What each number of devices would make of these groups: one alone without a link, never more than there are layers."""
        found, num_layers = [], sum(map(len, groups))
        for num in range(1, min(MOST_RANKS, num_layers) + 1 if self.link else 2):
            seconds = self.draft_seconds(groups, steps, num)
            num_gathers, num_bytes = pass_traffic(groups, num, self.costs.state_bytes)
            words = NUM_BROADCASTS * self.link.gather_seconds(num, 0) if self.link else 0.0
            rate = steps.acceptance_length / (seconds + words + self.elsewhere)
            said = {"devices": num, "draft_seconds": seconds, "tokens_per_second": rate}
            found.append({**said, "gathers_per_pass": num_gathers, "bytes_per_pass": num_bytes})
        return found


def measure_costs(drafter: LayerParallelDrafter, ids: torch.Tensor, width: int, num_new: int, repeats: int) -> Costs:
    """Medians of `repeats` passes after the text `ids` `[1, tokens]`: drafted ones over `width` tokens, exact ones over `num_new`."""
    clock, num_layers = _Clock(drafter), len(drafter.layered.layers)
    middle = list(range(1, num_layers - 1))
    backend = SequentialBackend(drafter.layered, [[0], middle, [num_layers - 1]])
    drafted = clock.passes(ids, width, backend, False, repeats)
    exact = clock.passes(ids, num_new, backend, True, repeats)
    parts = {name: statistics.median(each[name] for each in drafted) for name in ("attend", "finish", "read", "ends")}
    return Costs(
        attend=parts["attend"] / len(middle),
        finish=parts["finish"] / len(middle),
        layer=parts["read"] / 2,
        ends=parts["ends"],
        read=statistics.median(each["all"] for each in exact),
        state_bytes=width * drafter.model.config.hidden_size * drafter.dtype.itemsize,
    )


def time_passes(
    drafter: LayerParallelDrafter, ids: torch.Tensor, width: int, arms: Mapping[str, SequentialBackend], repeats: int
) -> list[dict[str, float]]:
    """Seconds of drafted passes over `width` tokens after the text `ids` `[1, tokens]`, all backends in every turn, in random order.

    Nothing is timed inside a pass, so that backends of any kind can be compared. The first turn, a warm-up, is left out.
    """
    passes = {name: _Pass(drafter, ids, width, backend, is_exact=False) for name, backend in arms.items()}
    order = random.Random(0)
    turns = [
        {name: passes[name].seconds() for name in order.sample([*passes], len(passes))} for _ in range(repeats + 1)
    ]
    return turns[1:]


class _Pass:
    """A pass over tokens that all follow one text, which is read exactly when this is made."""

    def __init__(
        self,
        drafter: LayerParallelDrafter,
        ids: torch.Tensor,
        num_tokens: int,
        backend: SequentialBackend,
        is_exact: bool,
    ) -> None:
        self._drafter, self._backend, self._is_exact = drafter, backend, is_exact
        self._cache, self._num_read = DynamicCache(), ids.shape[1]
        self._ids = ids[:, -1:].repeat(1, num_tokens)
        self._read(ids, torch.arange(self._num_read), is_exact=True)

    def seconds(self) -> float:
        """The seconds that the pass takes; the cache is as before afterwards."""
        num_tokens = self._ids.shape[1]
        start = _now()
        self._read(self._ids, torch.full((num_tokens,), self._num_read), self._is_exact)
        seconds = _now() - start
        self._cache.crop(-num_tokens)
        return seconds

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, positions: torch.Tensor, is_exact: bool) -> None:
        positions = positions.to(ids.device)[None]
        places = torch.arange(self._cache.get_seq_length(), device=ids.device)[None]
        places = torch.cat([places, positions], dim=-1)
        allowed = places[:, None] <= positions[..., None]
        states = self._drafter.read(ids, allowed, positions, places, self._cache, self._backend, is_exact)
        self._drafter.logits(states)


class _Clock:
    """Times the passes of a drafter part by part; the device is synchronised before and after each part."""

    def __init__(self, drafter: LayerParallelDrafter) -> None:
        self.drafter, self.layered = drafter, drafter.layered
        self.seconds: dict[str, float] = {}

    def passes(
        self, ids: torch.Tensor, num_tokens: int, backend: SequentialBackend, is_exact: bool, repeats: int
    ) -> list[dict[str, float]]:
        """Seconds by part of passes over `num_tokens` tokens that all follow the text; the first, a warm-up, is left out."""
        timed, found = _Pass(self.drafter, ids, num_tokens, backend, is_exact), []
        for _ in range(repeats + 1):
            self.seconds = dict.fromkeys(("attend", "finish", "read"), 0.0)
            with self._watching():
                whole = timed.seconds()
            found.append({**self.seconds, "ends": whole - sum(self.seconds.values()), "all": whole})
        return found[1:]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A context in which the parts of the layers are timed."""
        layered: Any = self.layered
        for name in self.seconds:
            setattr(layered, name, self._timed(name, getattr(layered, name)))
        try:
            yield
        finally:
            for name in self.seconds:
                delattr(layered, name)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = _now()
            result = function(*args)
            self.seconds[name] += _now() - start
            return result

        return timed


def measure_link(ranks: Processes, device: torch.device, repeats: int) -> Link:
    """The link between the ranks, all of which must ask at the same time: gathers of few and of many bytes, the quickest of each."""
    quickest = []
    for num_bytes in LINK_BYTES:
        part, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
        for _ in range(repeats + 1):
            start = _now()
            ranks.all_gather(part)
            seconds.append(_now() - start)
        quickest.append(min(seconds[1:]) / (ranks.num - 1))
    rate = (LINK_BYTES[1] - LINK_BYTES[0]) / max(quickest[1] - quickest[0], 1e-9)
    return Link(max(quickest[0] - LINK_BYTES[0] / rate, 0.0), rate)


def _now() -> float:
    synchronize()
    return time.perf_counter()
