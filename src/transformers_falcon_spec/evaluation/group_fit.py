"""Which layers of an EasySpec drafter should attend at once: acceptance measured for each group alone, and the groups it makes best.

Greedy text does not depend on the drafter, so it is written once; what a drafter would have been accepted of it is then found without
the target, step by step as the decoding loop would ask for drafts.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..core.sampling import private_generator
from ..core.verification import lazy_walk
from ..drafters.easyspec import LayerParallelDrafter
from ..generation.candidates import Committed, DraftBudget
from ..generation.loop import MAX_NODES
from ..generation.options import SpeculationConfig
from ..generation.target import Target

Groups = list[list[int]]


@dataclass(frozen=True)
class Text:
    """A text that the target wrote greedily.

    Args:
        token_ids (`tuple[int, ...]`): Prompt and answer.
        prompt_len (`int`): Tokens of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True)
class Steps:
    """What writing texts would take.

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
        """Of both."""
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

    @torch.no_grad()
    def steps(self, text: Text, groups: Groups) -> Steps:
        """What writing a text with these groups would take."""
        self.drafter.config.layer_groups = groups
        longest = text.prompt_len + self.max_new_tokens
        generator = self.drafter.candidate_generator(self.view, longest, private_generator())
        ids = torch.tensor([text.token_ids], device=self.drafter.device)
        length, num_new, found = (
            text.prompt_len + 1,
            text.prompt_len + 1,
            Steps(0, 0, 0, 0),
        )  # the prefill gives a token
        while length < len(text.token_ids):
            generator.commit(Committed(ids[:, :length], (length,), (num_new,), None))
            room = longest - length - 1
            draft = generator.propose(DraftBudget((room,), MAX_NODES)) if room else None
            num_kept, num_passes = 0, 0
            if draft is not None:
                rest = text.token_ids[length:]
                num_kept, num_passes = (
                    _num_kept(draft.parents[0].tolist(), draft.token_ids[0].tolist(), rest),
                    draft.num_passes,
                )
            found += Steps(1, num_kept, num_passes, int(num_passes > 0))
            length, num_new = length + num_kept + 1, num_kept + 1
        return found


def _num_kept(parents: list[int], token_ids: list[int], rest: Sequence[int]) -> int:
    """How many drafted tokens the text keeps that goes on with `rest`."""
    coming = iter(rest)
    num_left = len(rest)

    def commit(_node: int) -> tuple[int, bool]:
        nonlocal num_left
        num_left -= 1
        return next(coming), num_left == 0

    return lazy_walk(parents, token_ids, commit).num_accepted


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
