"""A cost model of EasySpec on several devices: parts are timed on one device, links are measured or given."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
from .draft_replay import StepCounts

MAX_DEVICES = 8
NUM_BROADCASTS = (
    4  # of a step: its draft and its accepted path, each after its length; too short for bandwidth to count
)
LINK_BYTES = (1 << 10, 1 << 24)  # of the two messages that tell latency from bandwidth


@dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between two devices."""

    latency_seconds: float
    bytes_per_second: float

    def gather_seconds(self, num_devices: int, num_bytes: float) -> float:
        """The time until all devices have all parts of `num_bytes`, which go round a ring."""
        return (num_devices - 1) * (self.latency_seconds + num_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Costs:
    """The seconds of the parts of drafting, on one device."""

    attend: float  # attention of one layer in a drafted pass
    finish: float  # the rest of that layer
    layer: float  # a whole layer that stands alone, in a drafted pass
    ends: float  # the rest of a drafted pass: embedding, masks, last norm and head
    read: float  # the exact pass that a step begins with
    state_bytes: int  # the output of one layer's attention in a drafted pass


def pass_traffic(groups: Sequence[Sequence[int]], num_devices: int, state_bytes: int) -> tuple[int, int]:
    """The number of exchanges in one drafted pass, and the bytes that each device receives in it."""
    sizes = [len(group) for group in groups if len(group) > 1]
    num_parts = sum(layers_of_rank(size, num_devices) for size in sizes)
    return (len(sizes), (num_devices - 1) * num_parts * state_bytes) if num_devices > 1 else (0, 0)


def pass_seconds(groups: Sequence[Sequence[int]], num_devices: int, costs: Costs, link: Link | None) -> float:
    """The seconds of one drafted pass on `num_devices`, which must have a link if there are several."""
    seconds = costs.ends
    for group in groups:
        if len(group) == 1:
            seconds += costs.layer
            continue
        num_own = layers_of_rank(len(group), num_devices)
        seconds += num_own * costs.attend + len(group) * costs.finish
        if num_devices > 1:
            assert link is not None  # the caller gives one for several devices
            seconds += link.gather_seconds(num_devices, num_own * costs.state_bytes)
    return seconds


@dataclass(frozen=True)
class StepModel:
    """The cost model of an average step."""

    costs: Costs
    elsewhere: float  # seconds of a step that are not drafter passes, the target's forward above all
    link: Link | None  # between devices, if several are asked about

    def draft_seconds(self, groups: Sequence[Sequence[int]], counts: StepCounts, num_devices: int) -> float:
        """The seconds of a step's drafter passes: an exact one if it drafts, and the drafted ones."""
        num_drafted = counts.num_passes - counts.num_drafts
        drafted = pass_seconds(groups, num_devices, self.costs, self.link)
        return (counts.num_drafts * self.costs.read + num_drafted * drafted) / max(counts.num_steps, 1)

    def on_devices(self, groups: Sequence[Sequence[int]], counts: StepCounts) -> list[dict[str, Any]]:
        """The speed of these groups on each number of devices: one alone without a link, never more than layers."""
        rows = []
        for num in range(1, min(MAX_DEVICES, sum(map(len, groups))) + 1 if self.link else 2):
            seconds = self.draft_seconds(groups, counts, num)
            num_gathers, num_bytes = pass_traffic(groups, num, self.costs.state_bytes)
            broadcasts = NUM_BROADCASTS * self.link.gather_seconds(num, 0) if self.link else 0.0
            row = {"devices": num, "draft_seconds": seconds}
            row["tokens_per_second"] = counts.acceptance_length / (seconds + broadcasts + self.elsewhere)
            rows.append({**row, "gathers_per_pass": num_gathers, "bytes_per_pass": num_bytes})
        return rows


def measure_costs(drafter: LayerParallelDrafter, ids: torch.Tensor, width: int, num_new: int, repeats: int) -> Costs:
    """Medians of passes after the text `ids` `[1, tokens]`: drafted over `width` tokens, exact over `num_new`."""
    num_layers = len(drafter.layered.layers)
    middle = list(range(1, num_layers - 1))
    backend = SequentialBackend(drafter.layered, [[0], middle, [num_layers - 1]])
    drafted = _part_seconds(TimedPass(drafter, ids, width, backend, is_exact=False), repeats)
    exact = _part_seconds(TimedPass(drafter, ids, num_new, backend, is_exact=True), repeats)
    return Costs(
        attend=drafted["attend"] / len(middle),
        finish=drafted["finish"] / len(middle),
        layer=drafted["read"] / 2,
        ends=drafted["ends"],
        read=exact["all"],
        state_bytes=width * drafter.model.config.hidden_size * drafter.dtype.itemsize,
    )


class TimedPass:
    """A drafter pass that can be repeated: `num_tokens` tokens that all follow the text `ids` `[1, tokens]`."""

    def __init__(
        self,
        drafter: LayerParallelDrafter,
        ids: torch.Tensor,
        num_tokens: int,
        backend: SequentialBackend,
        is_exact: bool,
    ) -> None:
        self.drafter, self._backend, self._is_exact = drafter, backend, is_exact
        self._cache, self._num_read = DynamicCache(), ids.shape[1]
        self._ids = ids[:, -1:].repeat(1, num_tokens)
        self._read(ids, torch.arange(self._num_read), is_exact=True)

    def seconds(self) -> float:
        """Make the pass and time it; the cache stays as it was."""
        num_tokens = self._ids.shape[1]
        start = _now()
        self._read(self._ids, torch.full((num_tokens,), self._num_read), self._is_exact)
        seconds = _now() - start
        self._cache.crop(-num_tokens)
        return seconds

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, positions: torch.Tensor, is_exact: bool) -> None:
        positions = positions.to(ids.device)[None]
        cached = torch.arange(self._cache.get_seq_length(), device=ids.device)[None]
        slots = torch.cat([cached, positions], dim=-1)
        allowed = slots[:, None] <= positions[..., None]
        states = self.drafter.read(ids, allowed, positions, slots, self._cache, self._backend, is_exact)
        self.drafter.logits(states)


def _part_seconds(timed: TimedPass, repeats: int) -> dict[str, float]:
    """The median seconds of each part of a pass, of the `ends`, and of `all`; the first pass is a warm-up."""
    passes = []
    for _ in range(repeats + 1):
        parts = dict.fromkeys(("attend", "finish", "read"), 0.0)
        with _timing(timed.drafter.layered, parts):
            total = timed.seconds()
        passes.append({**parts, "ends": total - sum(parts.values()), "all": total})
    return {name: statistics.median(each[name] for each in passes[1:]) for name in passes[0]}


@contextmanager
def _timing(layered: Any, parts: dict[str, float]) -> Iterator[None]:
    """A context in which the seconds of the methods named in `parts` are added up there; each call is waited for."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = _now()
            result = function(*args)
            parts[name] += _now() - start
            return result

        return call

    for name in parts:
        setattr(layered, name, timed(name, getattr(layered, name)))
    try:
        yield
    finally:
        for name in parts:
            delattr(layered, name)


def measure_link(processes: Processes, device: torch.device, repeats: int) -> Link:
    """Measure the link by the fastest gathers of few and of many bytes; all processes must call together."""
    fastest = []
    for num_bytes in LINK_BYTES:
        part, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
        for _ in range(repeats + 1):
            start = _now()
            processes.all_gather(part)
            seconds.append(_now() - start)
        fastest.append(min(seconds[1:]) / (processes.num - 1))
    rate = (LINK_BYTES[1] - LINK_BYTES[0]) / max(fastest[1] - fastest[0], 1e-9)
    return Link(max(fastest[0] - LINK_BYTES[0] / rate, 0.0), rate)


def _now() -> float:
    synchronize()
    return time.perf_counter()
