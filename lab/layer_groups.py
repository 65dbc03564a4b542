"""Divides an EasySpec drafter's layers into groups that attend at once, and models their speed on several devices."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.drafters.easyspec import Backend, layers_per_process
from transformers_falcon_spec.generation.distributed import Processes
from transformers_falcon_spec.generation.timed import synchronize

Groups = list[list[int]]
MAX_DEVICES = 8
LINK_BYTES = (1 << 10, 1 << 24)  # of two messages, by which latency and bandwidth are told apart
NUM_GATHERS = 20
NUM_BROADCASTS = 4  # of a step: its draft and its accepted path, each after its length; too short for bandwidth


class LayerByLayer(Backend):
    """The layers of a group one after another: what the fused backend is held against, and what needs no new weights."""

    def attend(self, number: int, states: Tensor, inputs: Any) -> Sequence[Tensor]:
        """Attention outputs `[rows, tokens, hidden]` of a group's layers, all over the same `states`."""
        return [self.layered.attend(index, states, inputs) for index in self.groups[number]]


def in_order(drafter: Any) -> Any:
    """The drafter, whose groups attend layer by layer from now on."""
    drafter.backend = lambda: LayerByLayer(drafter.layered, drafter.config.layer_groups)
    return drafter


def with_group(num_layers: int, start: int = 0, size: int = 1) -> Groups:
    """One group of `size` layers from `start`, and all other layers alone."""
    layers = [[layer] for layer in range(num_layers)]
    return [*layers[:start], list(range(start, start + size)), *layers[start + size :]]


def candidate_groups(num_layers: int, max_size: int) -> list[tuple[int, int]]:
    """Start and size of every group of 2 to `max_size` layers between the first and the last one."""
    return [(start, size) for size in range(2, max_size + 1) for start in range(1, num_layers - size)]


def best_divisions(num_layers: int, losses: Mapping[tuple[int, int], float]) -> list[Groups]:
    """The division of the layers that loses least, for each possible number of groups, most groups first.

    The loss of a division is estimated by the sum of what its groups lose alone.

    Args:
        num_layers (`int`): Layers of the model; the first and the last one stay alone.
        losses (`Mapping`): The loss of each candidate group, by start and size; a layer alone loses nothing.
    """
    pieces = {**dict.fromkeys(((layer, 1) for layer in range(1, num_layers - 1)), 0.0), **losses}
    best: dict[int, dict[int, tuple[float, Groups]]] = {1: {0: (0.0, [])}}  # by next layer and number of groups
    for end in range(2, num_layers):
        found: dict[int, tuple[float, Groups]] = {}
        for (start, size), loss in pieces.items():
            if start + size == end:
                for num, (before, groups) in best[start].items():
                    option = (before + loss, [*groups, list(range(start, end))])
                    found[num + 1] = min(found.get(num + 1, option), option)
        best[end] = found
    divisions = sorted(best[max(num_layers - 1, 1)].items(), reverse=True)
    return [[[0], *groups, [num_layers - 1]] if num_layers > 1 else [[0]] for _, (_, groups) in divisions]


@dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between two devices."""

    latency_seconds: float
    bytes_per_second: float

    def gather_seconds(self, num_devices: int, num_bytes: float) -> float:
        """The time until all devices have all parts of `num_bytes`, which go round a ring."""
        return (num_devices - 1) * (self.latency_seconds + num_bytes / self.bytes_per_second)


def measure_link(processes: Processes, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Link:
    """Measure the link by the fastest gathers of few and of many bytes; all processes must call together."""
    fastest = []
    for num_bytes in LINK_BYTES:
        part, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
        for _ in range(NUM_GATHERS + 1):
            start = clock()
            processes.all_gather(part)
            synchronize()
            seconds.append(clock() - start)
        fastest.append(min(seconds[1:]) / (processes.num - 1))
    rate = (LINK_BYTES[1] - LINK_BYTES[0]) / max(fastest[1] - fastest[0], 1e-9)
    return Link(max(fastest[0] - LINK_BYTES[0] / rate, 0.0), rate)


@dataclass(frozen=True)
class StepModel:
    """What a step of the drafter costs on one device, in seconds, and the link to others, if there are several."""

    drafter_pass: float  # mean of exact and drafted passes
    attend: float  # attention of one layer in a drafted pass: the part that devices share
    elsewhere: float  # of a step that are not drafter passes, the target's forward above all
    state_bytes: int  # the output of one layer's attention in a drafted pass
    link: Link | None = None

    def on_devices(self, groups: Sequence[Sequence[int]], stats: GenerationStats) -> list[dict[str, Any]]:
        """The speed on each number of devices: one alone without a link, never more than layers."""
        most = min(MAX_DEVICES, sum(map(len, groups))) if self.link else 1
        sizes = [len(group) for group in groups if len(group) > 1]
        return [self._on(num, sizes, stats) for num in range(1, most + 1)]

    def _on(self, num_devices: int, sizes: list[int], stats: GenerationStats) -> dict[str, Any]:
        """The speed with groups of these `sizes`: each device computes its share, an exchange brings the others."""
        shares = [layers_per_process(size, num_devices) for size in sizes]
        num_exact = stats.num_steps  # each draft begins with an exact pass
        saved = (sum(sizes) - sum(shares)) * self.attend
        exchanged = broadcast = 0.0
        if self.link:
            exchanged = sum(self.link.gather_seconds(num_devices, share * self.state_bytes) for share in shares)
            broadcast = NUM_BROADCASTS * self.link.gather_seconds(num_devices, 0)
        drafted = max(stats.num_passes - num_exact, 0) * (exchanged - saved)
        seconds = (stats.num_passes * self.drafter_pass + drafted) / max(stats.num_steps, 1)
        return {
            "devices": num_devices,
            "draft_seconds": seconds,
            "tokens_per_second": stats.acceptance_length / (seconds + broadcast + self.elsewhere),
            "gathers_per_pass": len(sizes) if num_devices > 1 else 0,
            "bytes_per_pass": (num_devices - 1) * sum(shares) * self.state_bytes,
        }
