"""How sure a drafter was and what its target chose, seen from outside while text is written with grown trees."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..core.tree_growth import Children, TreeGrowth
from ..drafters.base import DrafterModel
from ..drafters.tree_drafting.grown import GrownTreeGenerator
from ..errors import OptionError
from ..generation.drafting import Committed, Draft, DraftBudget, TargetView

STEPS_PER_OCTAVE = 16  # two neighbours differ by 4 %, less than what thousands of tokens can tell apart
OCTAVES = (-2, 3)
TEMPERATURES = tuple(
    2 ** (step / STEPS_PER_OCTAVE) for step in range(OCTAVES[0] * STEPS_PER_OCTAVE, OCTAVES[1] * STEPS_PER_OCTAVE + 1)
)
AS_IT_IS = len(TEMPERATURES)  # the step that stands for the temperature of a drafter that was not calibrated
NUM_BEST = 8  # tokens of a list that are kept for the reliability plot


@dataclass(frozen=True)
class Observations:
    """Lists of a drafter whose parents the target kept, and what it chose from each; enough to try any of `TEMPERATURES`.

    A temperature is named by its step: its index in `TEMPERATURES`, or `AS_IT_IS`.
    """

    depths: Tensor  # [lists] int64, of the nodes that come from the list; 1 below the root
    best: Tensor  # [lists, NUM_BEST] scores of its best tokens, best first
    chosen: Tensor  # [lists] score of the token that the target chose; -inf where the drafter cannot draft it
    ranks: Tensor  # [lists] int64, where that token stands in `best`; `best.shape[1]` where it does not
    log_norms: Tensor  # [lists, steps] log of the sum of exp(score / temperature)
    as_it_is: Tensor  # [lists] the temperature of a drafter that was not calibrated

    @classmethod
    def of(cls, depths: Sequence[int], scores: Tensor, chosen: Sequence[int], as_it_is: float) -> "Observations":
        """What is kept of whole lists; the work is one pass over the scores for each temperature.

        Args:
            depths (`Sequence[int]`): Of the lists' nodes.
            scores (`torch.Tensor` of shape `(lists, tokens)`): What the softmax at some temperature is taken of.
            chosen (`Sequence[int]`): Index of the token that the target chose; -1 where the drafter cannot draft it.
            as_it_is (`float`): The temperature of a drafter that was not calibrated.
        """
        scores, index = scores.detach().float(), torch.tensor(chosen, device=scores.device)
        best = scores.topk(min(NUM_BEST, scores.shape[-1]), dim=-1)
        is_it = best.indices == index[:, None]
        ranks = torch.where(is_it.any(-1), is_it.int().argmax(-1), best.indices.shape[1])
        found = scores.gather(1, index.clamp(min=0)[:, None])[:, 0].masked_fill(index < 0, -torch.inf)
        norms = torch.stack([(scores / each).logsumexp(-1) for each in (*TEMPERATURES, as_it_is)], dim=-1)
        used = torch.full((len(depths),), as_it_is, dtype=torch.float)
        return cls(torch.tensor(depths), best.values.cpu(), found.cpu(), ranks.cpu(), norms.cpu(), used)

    @classmethod
    def joined(cls, parts: Sequence["Observations"]) -> "Observations":
        """The lists of several observations in one."""
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Observations":
        """Read what `to_json` wrote."""
        chosen = [-torch.inf if score is None else score for score in value["chosen"]]
        types = {"depths": torch.long, "ranks": torch.long}
        found = {
            name: torch.tensor(entries, dtype=types.get(name, torch.float))
            for name, entries in (value | {"chosen": chosen}).items()
        }
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """Lists of numbers; scores to five digits after the point."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {
            name: (value.double().mul(1e5).round() / 1e5 if value.is_floating_point() else value).tolist()
            for name, value in found.items()
        }
        return lists | {"chosen": [None if score == -torch.inf else score for score in lists["chosen"]]}

    def __len__(self) -> int:
        """The number of lists."""
        return len(self.depths)

    def __getitem__(self, chosen: Tensor) -> "Observations":
        """Some of the lists, by a mask or by indices."""
        return Observations(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def losses(self) -> Tensor:
        """`[lists, steps]`: minus the log of the chance that the chosen token had; 0 where it cannot be drafted at all."""
        losses = self.log_norms - self.chosen[:, None] / self._temperatures
        return losses.masked_fill(self.chosen[:, None] == -torch.inf, 0.0)

    def chances(self, steps: Tensor) -> Tensor:
        """`[lists, NUM_BEST]`: chances of the best tokens, each list's at its step of `steps` `[lists]`."""
        temperatures = self._temperatures.gather(1, steps[:, None])
        return (self.best / temperatures - self.log_norms.gather(1, steps[:, None])).exp().clamp(max=1)

    @property
    def is_kept(self) -> Tensor:
        """`[lists, NUM_BEST]`: which of the best tokens the target chose."""
        return self.ranks[:, None] == torch.arange(self.best.shape[1])

    @property
    def _temperatures(self) -> Tensor:
        """The temperature `[lists, steps]` that each step stands for."""
        common = torch.tensor(TEMPERATURES, dtype=torch.float).expand(len(self), -1)
        return torch.cat([common, self.as_it_is[:, None]], dim=1)


class ListWatch:
    """A drafter that is watched: `drafter` drafts as the given one does, and what its lists held is taken after each text.

    Lists of all passes along the kept path are seen, each with the token that the target chose there, also where no node held it.

    Args:
        drafter ([`DrafterModel`]): One that grows trees; it stays as it is.

    Raises:
        [`OptionError`]: the drafter grows no trees.
    """

    def __init__(self, drafter: DrafterModel) -> None:
        if not drafter.is_tree_dynamic:
            raise OptionError(
                f"Chances are those of trees that grow, but this `{type(drafter).__name__}` drafts without. Take a drafter that can "
                "grow them, and set `dynamic_tree=True`."
            )
        self.drafter = copy.copy(drafter)  # the same weights
        self.drafter.config = copy.copy(drafter.config)
        self.drafter.config.confidence_temperatures = None
        self._make = self.drafter.candidate_generator
        self.drafter.candidate_generator = self._generator  # type: ignore[method-assign]
        self._depths: list[int] = []
        self._scores: list[Tensor] = []
        self._chosen: list[int] = []

    def take(self, temperature: float | None) -> Observations | None:
        """What was seen since the last call, of a text drawn at `temperature`; None if nothing was."""
        if not self._depths:
            return None
        as_it_is = 1.0 if temperature is None else temperature
        found = Observations.of(self._depths, torch.stack(self._scores), self._chosen, as_it_is)
        self._depths, self._scores, self._chosen = [], [], []
        return found

    def add(self, depth: int, scores: Tensor, chosen: int) -> None:
        """Note one list and the token that the target chose from it."""
        self._depths.append(depth)
        self._scores.append(scores)
        self._chosen.append(chosen)

    def _generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> GrownTreeGenerator:
        generator = self._make(target, max_length, rng)
        assert isinstance(generator, GrownTreeGenerator)  # its trees grow
        _WatchedCall(self, generator)
        return generator


class _WatchedCall:
    """What one generator drafts, of a call for one text: the scores of its lists, by the drafted tokens that each follows."""

    def __init__(self, watch: ListWatch, generator: GrownTreeGenerator) -> None:
        self.watch, self.generator = watch, generator
        self.lists: dict[tuple[int, ...], Tensor] = {}  # [places, tokens]: of a block, or of one node
        self.latest = torch.empty(0, dtype=torch.float)
        self.propose_inside, self.commit_inside = generator.propose, generator.commit
        self.children_inside, self.scores_inside = generator.children_of, generator.scores
        for name, method in (
            ("propose", self.propose),
            ("commit", self.commit),
            ("children_of", self.children_of),
            ("scores", self.scores),
        ):
            setattr(generator, name, method)

    def propose(self, budget: DraftBudget) -> Draft | None:
        self.lists = {}
        return self.propose_inside(budget)

    def scores(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        self.latest = self.scores_inside(logits, budget, depth)
        return self.latest

    def children_of(
        self, growth: TreeGrowth, features: Tensor, budget: DraftBudget, depth: int, width: int
    ) -> Children:
        children = self.children_inside(growth, features, budget, depth, width)

        def seen(place: int, nodes: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
            found = children(place, nodes, blocks)
            if place == 0 or not self.generator.is_blind:  # a blind block has the lists of all its places at once
                paths = growth.token_ids[0, growth.path_up(nodes, depth + place + 1)[0, :, 1:]]
                self.lists |= {
                    tuple(path): scores for path, scores in zip(paths.tolist(), self.latest[0], strict=True)
                }
            return found

        return seen

    def commit(self, committed: Committed) -> None:
        """What became text is the kept path and one token more."""
        (length,), (num_new,) = committed.lengths, committed.num_new
        tokens = committed.sequence_ids[0, length - num_new : length].tolist()
        num_places = self.generator.block_size if self.generator.is_blind else 1
        draft_ids = self.generator.target_ids(
            torch.arange(self.generator.num_draft_tokens, device=committed.sequence_ids.device)
        )
        for index, token in enumerate(tokens if self.lists else []):
            place = index % num_places
            lists = self.lists.get(tuple(tokens[: index - place]))
            if lists is None:
                break
            found = (draft_ids == token).nonzero().flatten().tolist()
            self.watch.add(index + 1, lists[place], found[0] if found else -1)
        self.lists = {}
        self.commit_inside(committed)
