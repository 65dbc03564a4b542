"""Temperatures at which a drafter's chances come true, and how far they are from that before and after.

Fitted by maximum likelihood: those at which the target's own tokens had the highest chances (temperature scaling, arXiv 1706.04599,
section 4.2), for each place of a block. Figures of a calibrated drafter are made with temperatures fitted to other prompts.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafters.tree_drafting.temperatures import confidence_temperature
from ..errors import OptionError
from .confidence import AS_IT_IS, OCTAVES, STEPS_PER_OCTAVE, TEMPERATURES, Observations
from .summary import bootstrap, wilson_interval

NUM_BINS = 15
NUM_FOLDS = 2
NUM_DRAWS = 100
MIN_LISTS = 20  # of a place; fewer say nothing of its temperature
SPREADS = (0.0, *TEMPERATURES)  # candidates for what sampling adds


@dataclass(frozen=True)
class Text:
    """One text: under which name of a decoding, at which temperature it was drawn (None: greedy), and what was seen."""

    prompt: str
    decoding: str
    temperature: float | None
    seen: Observations


@dataclass(frozen=True)
class Fit:
    """Temperatures by place, as a drafter's config stores them."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def to_json(self) -> dict[str, list[float]]:
        """The temperatures rounded to four digits, as the config stores them."""
        return {name: [float(f"{value:.4g}") for value in getattr(self, name)] for name in ("greedy", "sampled")}

    def steps(self, depths: Tensor, temperature: float | None, block_size: int) -> Tensor:
        """The step of each of `depths` under draws at `temperature`."""
        places = places_of(depths, len(self.greedy), block_size)
        pairs = zip(self.greedy, self.sampled, strict=True)
        return torch.tensor([nearest_step(confidence_temperature(*pair, temperature)) for pair in pairs])[places]


def places_of(depths: Tensor, num_places: int, block_size: int) -> Tensor:
    """The position (of `num_places`) that each depth belongs to; blocks beyond the last one count as the last one."""
    first = num_places - block_size
    return torch.where(depths <= num_places, depths - 1, first + (depths - 1) % block_size)


def nearest_step(temperature: float) -> int:
    """The step whose temperature is the nearest, of those that were tried."""
    step = round((math.log2(temperature) - OCTAVES[0]) * STEPS_PER_OCTAVE)
    return min(max(step, 0), len(TEMPERATURES) - 1)


def fit(texts: Sequence[Text], num_places: int, block_size: int) -> Fit:
    """The temperatures at which the chosen tokens are likeliest, greedy ones first, then what sampling adds.

    Raises:
        [`OptionError`]: a place was hardly ever reached, greedy or sampled.
    """
    greedy, sampled = [], []
    for place in range(num_places):
        totals = _totals(texts, place, num_places, block_size)
        cold = totals[None]
        greedy.append(TEMPERATURES[int(cold.argmin())])
        hot = {temperature: total for temperature, total in totals.items() if temperature is not None}
        losses = [
            sum(
                float(total[nearest_step(confidence_temperature(greedy[-1], spread, temperature))])
                for temperature, total in hot.items()
            )
            for spread in SPREADS
        ]
        sampled.append(SPREADS[losses.index(min(losses))])
    return Fit(tuple(greedy), tuple(sampled))


def _totals(texts: Sequence[Text], place: int, num_places: int, block_size: int) -> dict[float | None, Tensor]:
    """The summed loss `[steps]` of all lists of one position, for each sampling temperature."""
    totals: dict[float | None, Tensor] = {}
    counts = {True: 0, False: 0}
    for text in texts:
        is_here = places_of(text.seen.depths, num_places, block_size) == place
        counts[text.temperature is None] += int(is_here.sum())
        found = text.seen.losses[is_here, :AS_IT_IS].double().sum(0)
        totals[text.temperature] = totals.get(text.temperature, torch.zeros(AS_IT_IS, dtype=torch.double)) + found
    if min(counts.values()) < MIN_LISTS:
        raise OptionError(
            f"Each place needs at least {MIN_LISTS} tokens, greedy and sampled, but place {place + 1} of {num_places} saw "
            f"{counts[True]} and {counts[False]}. Give more prompts, longer texts or fewer passes."
        )
    return totals


def expected_calibration_error(chances: Tensor, is_kept: Tensor) -> float:
    """Mean distance of chances from the share that came true, in `NUM_BINS` bins of equal size; chances and truths are flat.

    Example:

    ```python
    >>> expected_calibration_error(torch.full((100,), 0.5), torch.arange(100) % 4 == 0)
    0.25

    ```
    """
    order = chances.argsort(stable=True)
    bins = zip(chances[order].chunk(NUM_BINS), is_kept[order].chunk(NUM_BINS), strict=True)
    gaps = [len(chance) * abs(float(chance.double().mean() - kept.double().mean())) for chance, kept in bins]
    return sum(gaps) / len(chances)


def error_by_luck(chances: Tensor, seed: int) -> float:
    """The calibration error that is left on average if every node comes true with exactly its chance."""
    generator, total = torch.Generator().manual_seed(seed), 0.0
    for chance in chances.sort().values.double().chunk(NUM_BINS):
        num_kept = (
            (torch.rand(NUM_DRAWS, len(chance), generator=generator, dtype=torch.float) < chance).double().sum(dim=1)
        )
        total += float((num_kept - chance.sum()).abs().mean())
    return total / len(chances)


def reliability(chances: Tensor, is_kept: Tensor) -> list[dict[str, Any]]:
    """Bins of equal size, least likely first: mean chance, share that came true with its interval, and how many."""
    order, bins = chances.argsort(stable=True), []
    for chance, kept in zip(chances[order].chunk(NUM_BINS), is_kept[order].chunk(NUM_BINS), strict=True):
        num_kept, num = int(kept.sum()), len(kept)
        bins.append(
            {
                "chance": float(chance.double().mean()),
                "share": num_kept / num,
                "interval": wilson_interval(num_kept, num),
                "num_nodes": num,
            }
        )
    return bins


def fits_of_folds(texts: Sequence[Text], num_places: int, block_size: int) -> list[Fit]:
    """Fit the temperatures once for each fold of the prompts, to the prompts of all other folds."""
    folds = fold_of(texts)
    return [
        fit([text for text in texts if folds[text.prompt] != fold], num_places, block_size)
        for fold in range(NUM_FOLDS)
    ]


def fold_of(texts: Sequence[Text]) -> dict[str, int]:
    """The fold of each prompt, in turn."""
    return {prompt: number % NUM_FOLDS for number, prompt in enumerate(sorted({text.prompt for text in texts}))}


def compare(texts: Sequence[Text], fits: Sequence[Fit], block_size: int, seed: int) -> list[dict[str, Any]]:
    """One row for each decoding: errors of the drafter as it is, and with temperatures fitted to other prompts."""
    folds, rows = fold_of(texts), []
    for decoding in dict.fromkeys(text.decoding for text in texts):
        chosen = [text for text in texts if text.decoding == decoding]
        before = [(text, torch.full_like(text.seen.depths, AS_IT_IS)) for text in chosen]
        after = [(t, fits[folds[t.prompt]].steps(t.seen.depths, t.temperature, block_size)) for t in chosen]
        losses = [(_loss(first), _loss(second), len(second[1])) for first, second in zip(before, after, strict=True)]
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


Stepped = tuple[Text, Tensor]  # a text and the steps of its lists


def loss_saved(texts: Sequence[tuple[float, float, int]]) -> float:
    """How much less the loss of a list is after than before; of each text both sums and how many lists it has."""
    return sum(before - after for before, after, _ in texts) / sum(num for _, _, num in texts)


def _loss(stepped: Stepped) -> float:
    """Of all lists of a text together."""
    text, steps = stepped
    return float(text.seen.losses.gather(1, steps[:, None]).double().sum())


def _figures(stepped: Sequence[Stepped], seed: int) -> dict[str, Any]:
    """Loss of the chosen token; error, what luck alone leaves of it, and bins, of all nodes and of the best of each list."""
    num_lists = sum(len(steps) for _, steps in stepped)
    found: dict[str, Any] = {"loss": sum(map(_loss, stepped)) / num_lists}
    for name, width in (("all_nodes", None), ("best_nodes", 1)):
        chances = torch.cat([text.seen.chances(steps)[:, :width].flatten() for text, steps in stepped])
        is_kept = torch.cat([text.seen.is_kept[:, :width].flatten() for text, _ in stepped])
        found[name] = {
            "error": expected_calibration_error(chances, is_kept),
            "error_by_luck": error_by_luck(chances, seed),
            "bins": reliability(chances, is_kept),
        }
    return found


def read_calibration(path: Path) -> dict[str, Any] | None:
    """A results file of `falcon-spec calibrate`; None where the file is of another kind."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and "fits_of_folds" in result else None
