"""Which layers of an EasySpec drafter should attend at once: acceptance measured for each group alone, and the groups it makes best."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..drafters.easyspec import LayerParallelDrafter
from ..generation.options import SpeculationConfig
from ..generation.target import Target
from .drafted_texts import Text, replayed

Groups = list[list[int]]


@dataclass(frozen=True)
class Steps:
    """Counts of the steps and drafter passes that writing texts would take.

    Args:
        num_steps (`int`): Steps of the decoding loop.
        num_accepted (`int`): Drafted tokens that were kept.
        num_passes (`int`): Drafter passes, the exact ones included.
        num_drafts (`int`): Steps that drafted.
    """

    num_steps: int
    num_accepted: int
    num_passes: int
    num_drafts: int

    def __add__(self, other: "Steps") -> "Steps":
        """The counts of both together."""
        names = ("num_steps", "num_accepted", "num_passes", "num_drafts")
        return Steps(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step, the bonus token included."""
        return 1 + self.num_accepted / max(self.num_steps, 1)


class Replay:
    """Counts what a drafter would have been accepted of texts, with any groups.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target that wrote the texts; not read.
        drafter ([`LayerParallelDrafter`]): The drafter; stays as it is.
        options ([`SpeculationConfig`]): The trees to draft.
        max_new_tokens (`int`): What the texts were limited to; the loop drafts no further.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: LayerParallelDrafter,
        options: SpeculationConfig,
        max_new_tokens: int,
    ) -> None:
        self.view, self.max_new_tokens = Target(target, ()), max_new_tokens
        self.drafter = copy.copy(drafter)  # the same weights
        self.drafter.config = copy.copy(drafter.config)
        self.drafter.config.backend = "sequential"  # whose weights need not be made anew for other groups
        self.drafter.generation_config = options

    def steps(self, text: Text, groups: Groups) -> Steps:
        """The counts of writing a text with these groups of layers."""
        self.drafter.config.layer_groups = groups
        found = Steps(0, 0, 0, 0)
        for draft, num_kept in replayed(self.view, self.drafter, text, self.max_new_tokens):
            num_passes = 0 if draft is None else draft.num_passes
            found += Steps(1, num_kept, num_passes, int(num_passes > 0))
        return found


def singles(num_layers: int) -> Groups:
    """Every layer alone: the draft model as it is."""
    return [[layer] for layer in range(num_layers)]


def with_group(num_layers: int, start: int, size: int) -> Groups:
    """One group, all other layers alone."""
    group = list(range(start, start + size))
    return [[layer] for layer in range(start)] + [group] + [[layer] for layer in range(start + size, num_layers)]


def candidate_groups(num_layers: int, max_size: int) -> list[tuple[int, int]]:
    """Start and size of every group of 2 to `max_size` layers between the first and the last one."""
    return [(start, size) for size in range(2, max_size + 1) for start in range(1, num_layers - size)]


def best_divisions(num_layers: int, losses: Mapping[tuple[int, int], float]) -> list[Groups]:
    """For each possible number of groups the division of the layers that loses least, most groups first.

    What a division loses is taken to be the sum of what its groups lose alone.

    Args:
        num_layers (`int`): Layers of the model; the first and the last one stay alone.
        losses (`Mapping`): By start and size what each candidate group loses; a layer alone loses nothing.
    """
    priced = {**dict.fromkeys(((layer, 1) for layer in range(1, num_layers - 1)), 0.0), **losses}
    best: dict[int, dict[int, tuple[float, Groups]]] = {
        1: {0: (0.0, [])}
    }  # by the next layer and the number of groups
    for end in range(2, num_layers):
        found: dict[int, tuple[float, Groups]] = {}
        for (start, size), loss in priced.items():
            if start + size != end:
                continue
            for num, (before, groups) in best[start].items():
                option = (before + loss, [*groups, list(range(start, end))])
                found[num + 1] = min(found.get(num + 1, option), option)
        best[end] = found
    divisions = sorted(best[max(num_layers - 1, 1)].items(), reverse=True)
    return [[[0], *groups, [num_layers - 1]] if num_layers > 1 else [[0]] for _, (_, groups) in divisions]
