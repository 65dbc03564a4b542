"""Fits temperatures that make a drafter's probabilities come true, to what was observed while it drafted.

A drafter is observed while text is written with grown trees: its scores, and the tokens that the target chose. The
likelihood of these tokens is maximised (temperature scaling, arXiv 1706.04599, section 4.2), for each position of a
block.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.tree import Children, TreeGrowth
from ..drafters.base import DrafterModel
from ..drafters.config_fields import confidence_temperature
from ..drafters.tree_drafting.proposing import PairGenerator
from ..errors import OptionError
from ..generation.drafting import Committed, Draft, DraftBudget, TargetView

STEPS_PER_OCTAVE = 16  # two neighbours differ by 4 %, less than what thousands of tokens can show
OCTAVES = (-2, 3)
TEMPERATURES = tuple(
    2 ** (step / STEPS_PER_OCTAVE) for step in range(OCTAVES[0] * STEPS_PER_OCTAVE, OCTAVES[1] * STEPS_PER_OCTAVE + 1)
)
UNCALIBRATED = len(TEMPERATURES)  # the index that stands for the temperature of a drafter that was not calibrated
MIN_LISTS = 20  # of a position; fewer say nothing of its temperature
SPREADS = (0.0, *TEMPERATURES)  # candidates for what sampling adds

Fit = dict[
    str, list[float]
]  # temperatures by block position, `greedy` and `sampled`, as a drafter's config holds them


@dataclass(frozen=True)
class Observations:
    """How likely the target's choices were for a drafter, list by list of those whose parents were accepted.

    They suffice to try any of `TEMPERATURES`, which are named by their index, or by `UNCALIBRATED`.
    """

    depths: Tensor  # [lists] int64, of the nodes that come from the list; 1 below the root
    losses: Tensor  # [lists, temperatures] minus the log-probability of the chosen token; 0 if it cannot be drafted

    @classmethod
    def of(cls, depths: Sequence[int], scores: Tensor, chosen: Sequence[int], as_it_is: float) -> "Observations":
        """Observe whole lists `scores` `[lists, tokens]`, logits before the temperature.

        `chosen` is the index of the token that the target chose, or -1 if the drafter cannot draft it; `as_it_is` the
        temperature of a drafter that was not calibrated.
        """
        scores = scores.detach().float()
        index = torch.tensor(chosen, device=scores.device)
        found = scores.gather(1, index.clamp(min=0)[:, None])[:, 0]
        temperatures = (*TEMPERATURES, as_it_is)
        losses = torch.stack([(scores / each).logsumexp(-1) - found / each for each in temperatures], dim=-1)

        return cls(torch.tensor(depths), losses.masked_fill(index[:, None] < 0, 0.0).cpu())

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Observations":
        """Read what `to_json` wrote."""
        return cls(torch.tensor(value["depths"]), torch.tensor(value["losses"], dtype=torch.float))

    def to_json(self) -> dict[str, Any]:
        """Lists of numbers, with losses to five digits after the point."""
        losses = self.losses.double().round(decimals=5)
        return {"depths": self.depths.tolist(), "losses": losses.tolist()}


class DrafterObserver:
    """Records the texts of its `drafter`, which drafts as the given one, which stays as it is, without calibration.

    The lists of all passes along the accepted path are recorded with the token that the target chose, even if no node
    held it.
    """

    def __init__(self, drafter: DrafterModel) -> None:
        if not (drafter.can_grow_trees and drafter.is_tree_dynamic):
            raise OptionError(
                f"Calibration needs a drafter that grows trees, but this `{type(drafter).__name__}` drafts without. "
                "Take a drafter that can grow them, and set `dynamic_tree=True`."
            )

        self.drafter = copy.copy(drafter)  # the same weights
        self.drafter.config = copy.copy(drafter.config)
        self.drafter.config.confidence_temperatures = None
        self.drafter.generation_config = copy.copy(drafter.generation_config)
        self.drafter.generation_config.prompt_lookup_num_tokens = 0  # repeated text says nothing of the drafter
        self._make_generator = self.drafter.candidate_generator
        self.drafter.candidate_generator = self._generator  # type: ignore[method-assign]
        self.seen: list[tuple[int, Tensor, int]] = []  # depth, scores and chosen index of each list

    def take(self, temperature: float | None, kind: type[Observations] = Observations) -> Observations | None:
        """The observations since the last call, of texts drawn at `temperature`; None if there are none."""
        if not self.seen:
            return None

        depths, scores, chosen = zip(*self.seen, strict=True)
        self.seen.clear()
        return kind.of(depths, torch.stack(scores), chosen, 1.0 if temperature is None else temperature)

    def _generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> PairGenerator:
        generator: Any = self._make_generator(target, max_length, rng)
        generator.__class__ = type(
            "ObservedGenerator", (_ObservedGenerator, type(generator)), {"seen": self.seen, "lists": {}}
        )
        return generator


class _ObservedGenerator(PairGenerator):
    """The scores of a generator's lists, by the drafted tokens that each follows."""

    seen: list[tuple[int, Tensor, int]]
    lists: dict[tuple[int, ...], Tensor]  # [block positions, tokens], or [1, tokens] of one node
    latest: Tensor

    def propose(self, budget: DraftBudget) -> Draft | None:
        self.lists = {}
        return super().propose(budget)

    def why_not_fixed(self, budget: DraftBudget) -> str | None:  # noqa: ARG002  whatever it allows
        return "the drafter's scores are observed"

    def scores(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        self.latest = super().scores(logits, budget, depth)
        return self.latest

    def logits_after(self, token_ids: Tensor, logits: Tensor, prepared: Tensor, blocks: Tensor) -> Tensor:
        after = super().logits_after(token_ids, logits, prepared, blocks)
        self.latest = after[:, :, None]
        return after

    def children_of(
        self, growth: TreeGrowth, features: Tensor, budget: DraftBudget, depth: int, width: int
    ) -> Children:
        children = super().children_of(growth, features, budget, depth, width)

        def observed(offset: int, nodes: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
            found = children(offset, nodes, blocks)
            # a block predicted independently shows all its lists at offset 0
            if offset == 0 or not self.predicts_independently:
                paths = growth.token_ids[0, growth.path_up(nodes, depth + offset + 1)[0, :, 1:]].tolist()
                self.lists |= dict(zip(map(tuple, paths), self.latest[0], strict=True))

            return found

        return observed

    def commit(self, committed: Committed) -> None:
        """Record the lists along the new text, which is the accepted path and one token more."""
        (length,), (num_new,), drafted = committed.lengths, committed.num_new, self.lists
        tokens = committed.sequence_ids[0, length - num_new : length].tolist()

        num_offsets = self.block_size if self.predicts_independently else 1
        draft_ids = self.target_ids(torch.arange(self.num_draftable_tokens, device=committed.sequence_ids.device))
        for index, token in enumerate(tokens if drafted else []):
            offset = index % num_offsets
            lists = drafted.get(tuple(tokens[: index - offset]))
            if lists is None:
                break

            found = (draft_ids == token).nonzero().flatten().tolist()
            self.seen.append((index + 1, lists[offset], found[0] if found else -1))

        self.lists = {}
        super().commit(committed)


# The fit


@dataclass(frozen=True)
class ObservedText:
    """A text of a prompt under a named decoding, drawn at a temperature (None: greedy), with what was observed."""

    prompt: str
    decoding: str
    temperature: float | None
    seen: Observations


def nearest_index(temperature: float) -> int:
    """The index of the nearest of `TEMPERATURES`."""
    step = round((math.log2(temperature) - OCTAVES[0]) * STEPS_PER_OCTAVE)
    return min(max(step, 0), len(TEMPERATURES) - 1)


def fit(texts: Sequence[ObservedText], block_size: int) -> Fit:
    """Fit the temperatures at which the chosen tokens are likeliest: greedy ones first, then what sampling adds.

    Positions that [`num_seen_positions`] does not count take those of the last one that it does.
    """
    last_seen = num_seen_positions(texts, block_size) - 1
    found: Fit = {"greedy": [], "sampled": []}
    for position in range(block_size):
        totals = _totals(texts, min(position, last_seen), block_size)
        greedy = TEMPERATURES[int(totals.pop(None).argmin())]

        losses = []
        for spread in SPREADS:
            loss = 0.0
            for heat, total in totals.items():
                loss += float(total[nearest_index(confidence_temperature(greedy, spread, heat))])

            losses.append(loss)

        sampled = SPREADS[losses.index(min(losses))]
        found["greedy"].append(float(f"{greedy:.4g}"))
        found["sampled"].append(float(f"{sampled:.4g}"))

    return found


def num_seen_positions(texts: Sequence[ObservedText], block_size: int) -> int:
    """The number of positions of a block, from the first on, that saw enough tokens: few texts reach deep ones.

    Raises:
        [`OptionError`]: the first position saw too few.
    """
    for position in range(block_size):
        counts = {True: 0, False: 0}
        for text in texts:
            counts[text.temperature is None] += int(_is_at(text, position, block_size).sum())

        if min(counts.values()) < MIN_LISTS:
            if position:
                return position

            raise OptionError(
                f"The first position needs at least {MIN_LISTS} tokens, greedy and sampled, but it saw {counts[True]} "
                f"and {counts[False]}. Give more prompts or longer texts."
            )

    return block_size


def _totals(texts: Sequence[ObservedText], position: int, block_size: int) -> dict[float | None, Tensor]:
    """The summed loss `[temperatures]` of all lists of one position, for each sampling temperature."""
    totals: dict[float | None, Tensor] = {}
    for text in texts:
        found = text.seen.losses[_is_at(text, position, block_size), :UNCALIBRATED].double().sum(0)
        totals[text.temperature] = totals.get(text.temperature, torch.zeros(UNCALIBRATED, dtype=torch.double)) + found

    return totals


def _is_at(text: ObservedText, position: int, block_size: int) -> Tensor:
    """Which lists of a text are at this position of a block."""
    return (text.seen.depths - 1) % block_size == position
