"""Fits temperatures that make a drafter's probabilities come true, and measures its calibration before and after.

The likelihood of the target's own tokens is maximised (temperature scaling, arXiv 1706.04599, section 4.2), for each
position of a block. Figures of a calibrated drafter come from temperatures fitted to other prompts.
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
from .summary import bootstrap, wilson_interval

NUM_BINS = 15
NUM_FOLDS = 2
NUM_DRAWS = 100
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
        return {name: [float(f"{value:.4g}") for value in getattr(self, name)] for name in ("greedy", "sampled")}

    def indices(self, depths: Tensor, temperature: float | None, block_size: int) -> Tensor:
        """The index in `TEMPERATURES` of each of `depths` in texts drawn at `temperature`."""
        pairs = zip(self.greedy, self.sampled, strict=True)
        by_position = torch.tensor([nearest_index(confidence_temperature(*pair, temperature)) for pair in pairs])
        return by_position[positions_of(depths, len(self.greedy), block_size)]


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
            indices = {heat: nearest_index(confidence_temperature(greedy[-1], spread, heat)) for heat in totals}
            losses.append(sum(float(total[indices[heat]]) for heat, total in totals.items()))
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


def reliability(probs: Tensor, is_kept: Tensor) -> list[dict[str, Any]]:
    """The bins of a reliability plot, of equal size: mean probability, accepted share with its interval, and size."""
    order, rows = probs.argsort(stable=True), []
    for prob, kept in zip(probs[order].double().chunk(NUM_BINS), is_kept[order].double().chunk(NUM_BINS), strict=True):
        num_kept, num = int(kept.sum()), len(kept)
        shares = {"share": num_kept / num, "interval": wilson_interval(num_kept, num)}
        rows.append({"probability": float(prob.mean()), **shares, "num_nodes": num})
    return rows


def expected_calibration_error(bins: Sequence[dict[str, Any]]) -> float:
    """Mean distance of probabilities from the accepted share.

    Example:

    ```python
    >>> expected_calibration_error(reliability(torch.full((100,), 0.5), torch.arange(100) % 4 == 0))
    0.25

    ```
    """
    num_nodes = sum(each["num_nodes"] for each in bins)
    return sum(each["num_nodes"] * abs(each["probability"] - each["share"]) for each in bins) / num_nodes


def error_by_luck(probs: Tensor, seed: int) -> float:
    """The calibration error that is left on average if every node is accepted with exactly its probability."""
    generator, total = torch.Generator().manual_seed(seed), 0.0
    for prob in probs.sort().values.double().chunk(NUM_BINS):
        draws = torch.rand(NUM_DRAWS, len(prob), generator=generator, dtype=torch.float)
        total += float(((draws < prob).double().sum(dim=1) - prob.sum()).abs().mean())
    return total / len(probs)


def fits_of_folds(texts: Sequence[ObservedText], num_positions: int, block_size: int) -> list[Fit]:
    """Fit the temperatures once for each fold of the prompts, to the prompts of all other folds."""
    folds = fold_of(texts)
    return [
        fit([text for text in texts if folds[text.prompt] != fold], num_positions, block_size)
        for fold in range(NUM_FOLDS)
    ]


def fold_of(texts: Sequence[ObservedText]) -> dict[str, int]:
    """The fold of each prompt, in turn."""
    return {prompt: number % NUM_FOLDS for number, prompt in enumerate(sorted({text.prompt for text in texts}))}


def compare(texts: Sequence[ObservedText], fits: Sequence[Fit], block_size: int, seed: int) -> list[dict[str, Any]]:
    """One row for each decoding: errors of the drafter as it is, and with temperatures fitted to other prompts."""
    folds, rows = fold_of(texts), []
    for decoding in dict.fromkeys(text.decoding for text in texts):
        chosen = [text for text in texts if text.decoding == decoding]
        before = [(text, torch.full_like(text.seen.depths, UNCALIBRATED)) for text in chosen]
        after = [(t, fits[folds[t.prompt]].indices(t.seen.depths, t.temperature, block_size)) for t in chosen]
        losses = [(_loss(*old), _loss(*new), len(new[1])) for old, new in zip(before, after, strict=True)]
        rows.append(
            {
                "decoding": decoding,
                "num_texts": len(chosen),
                "num_lists": sum(len(text.seen) for text in chosen),
                "num_undraftable": sum(int((text.seen.chosen == -torch.inf).sum()) for text in chosen),
                "before": _figures(before, seed),
                "after": _figures(after, seed),
                "loss_saved": loss_saved(losses),
                "loss_saved_interval": bootstrap(losses, loss_saved, seed),
            }
        )
    return rows


def loss_saved(texts: Sequence[tuple[float, float, int]]) -> float:
    """The mean decrease of a list's loss; of each text come the summed loss before and after, and its lists."""
    return sum(before - after for before, after, _ in texts) / sum(num for _, _, num in texts)


def _loss(text: ObservedText, indices: Tensor) -> float:
    """The summed loss of a text's lists, each at the temperature of its index."""
    return float(text.seen.losses.gather(1, indices[:, None]).double().sum())


def _figures(texts: Sequence[tuple[ObservedText, Tensor]], seed: int) -> dict[str, Any]:
    """Loss of the chosen tokens; error, error by luck and bins, of all nodes and of the best node of each list."""
    num_lists = sum(len(indices) for _, indices in texts)
    found: dict[str, Any] = {"loss": sum(_loss(*each) for each in texts) / num_lists}
    for name, width in (("all_nodes", None), ("best_nodes", 1)):
        probs = torch.cat([text.seen.best_probs(indices)[:, :width].flatten() for text, indices in texts])
        is_kept = torch.cat([text.seen.is_kept[:, :width].flatten() for text, _ in texts])
        bins = reliability(probs, is_kept)
        error, by_luck = expected_calibration_error(bins), error_by_luck(probs, seed)
        found[name] = {"error": error, "error_by_luck": by_luck, "bins": bins}
    return found
