"""Fits temperatures that make a drafter's probabilities come true.

The likelihood of the target's own tokens is maximised (temperature scaling, arXiv 1706.04599, section 4.2), for each
position of a block. What is shown of a fit was measured on prompts that it was not fitted to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..drafters.tree_drafting.configuration import confidence_temperature
from ..errors import OptionError
from .observations import OCTAVES, STEPS_PER_OCTAVE, TEMPERATURES, UNCALIBRATED, Observations

NUM_FOLDS = 2
MIN_LISTS = 20  # of a position; fewer say nothing of its temperature
SPREADS = (0.0, *TEMPERATURES)  # candidates for what sampling adds


@dataclass(frozen=True)
class ObservedText:
    """A text of a prompt under a named decoding, drawn at a temperature (None: greedy), with what was observed."""

    prompt: str
    decoding: str
    temperature: float | None
    seen: Observations


@dataclass(frozen=True)
class Fit:
    """Temperatures by block position, as a drafter's config stores them."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def to_json(self) -> dict[str, list[float]]:
        """The temperatures rounded to four digits, as the config stores them."""
        return {"greedy": _rounded(self.greedy), "sampled": _rounded(self.sampled)}

    def indices(self, depths: Tensor, temperature: float | None, block_size: int) -> Tensor:
        """The index in `TEMPERATURES` of each of `depths` in texts drawn at `temperature`."""
        by_position = []
        for greedy, sampled in zip(self.greedy, self.sampled, strict=True):
            by_position.append(nearest_index(confidence_temperature(greedy, sampled, temperature)))
        return torch.tensor(by_position)[positions_of(depths, len(by_position), block_size)]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def positions_of(depths: Tensor, num_positions: int, block_size: int) -> Tensor:
    """The position (of `num_positions`) of each depth; blocks beyond the last one count as the last one."""
    first = num_positions - block_size
    return torch.where(depths <= num_positions, depths - 1, first + (depths - 1) % block_size)


def nearest_index(temperature: float) -> int:
    """The index of the nearest of `TEMPERATURES`."""
    step = round((math.log2(temperature) - OCTAVES[0]) * STEPS_PER_OCTAVE)
    return min(max(step, 0), len(TEMPERATURES) - 1)


def fit(texts: Sequence[ObservedText], num_positions: int, block_size: int) -> Fit:
    """Fit the temperatures at which the chosen tokens are likeliest: greedy ones first, then what sampling adds."""
    greedy, sampled = [], []
    for position in range(num_positions):
        totals = _totals(texts, position, num_positions, block_size)
        greedy.append(TEMPERATURES[int(totals.pop(None).argmin())])

        losses = []
        for spread in SPREADS:
            loss = 0.0
            for heat, total in totals.items():
                loss += float(total[nearest_index(confidence_temperature(greedy[-1], spread, heat))])
            losses.append(loss)

        sampled.append(SPREADS[losses.index(min(losses))])

    return Fit(tuple(greedy), tuple(sampled))


def _totals(
    texts: Sequence[ObservedText], position: int, num_positions: int, block_size: int
) -> dict[float | None, Tensor]:
    """The summed loss `[temperatures]` of all lists of one position, for each sampling temperature."""
    totals: dict[float | None, Tensor] = {}
    counts = {True: 0, False: 0}
    for text in texts:
        is_here = positions_of(text.seen.depths, num_positions, block_size) == position
        counts[text.temperature is None] += int(is_here.sum())
        found = text.seen.losses[is_here, :UNCALIBRATED].double().sum(0)
        totals[text.temperature] = totals.get(text.temperature, torch.zeros(UNCALIBRATED, dtype=torch.double)) + found

    if min(counts.values()) < MIN_LISTS:
        raise OptionError(
            f"Each position needs at least {MIN_LISTS} tokens, greedy and sampled, but position {position + 1} of "
            f"{num_positions} saw {counts[True]} and {counts[False]}. Give more prompts, longer texts or fewer passes."
        )

    return totals


def fits_of_folds(texts: Sequence[ObservedText], num_positions: int, block_size: int) -> list[Fit]:
    """Fit the temperatures once for each fold of the prompts, to the prompts of all other folds."""
    folds = fold_of(texts)
    fits = []
    for fold in range(NUM_FOLDS):
        others = [text for text in texts if folds[text.prompt] != fold]
        fits.append(fit(others, num_positions, block_size))
    return fits


def fold_of(texts: Sequence[ObservedText]) -> dict[str, int]:
    """The fold of each prompt, in turn."""
    prompts = sorted({text.prompt for text in texts})
    return {prompt: number % NUM_FOLDS for number, prompt in enumerate(prompts)}


def compare(texts: Sequence[ObservedText], fits: Sequence[Fit], block_size: int) -> list[dict[str, Any]]:
    """One row for each decoding: the mean loss of a list as the drafter is, and as fitted to the other prompts."""
    folds = fold_of(texts)
    rows = []
    for decoding in dict.fromkeys(text.decoding for text in texts):
        num_lists = 0
        before = after = 0.0
        for text in texts:
            if text.decoding == decoding:
                fitted = fits[folds[text.prompt]].indices(text.seen.depths, text.temperature, block_size)
                num_lists += len(fitted)
                before += float(text.seen.losses[:, UNCALIBRATED].sum())
                after += float(text.seen.losses.gather(1, fitted[:, None]).sum())

        losses = {"loss_before": before / num_lists, "loss_after": after / num_lists}
        rows.append({"decoding": decoding, "num_lists": num_lists, **losses})

    return rows
