"""Temperatures by position at which a drafter's probabilities come true; `falcon-spec calibrate` fits them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import OptionError

PARTS = ("greedy", "sampled")


def check_temperatures(values: dict[str, Any] | None, block_size: int) -> None:
    """Refuse stored `confidence_temperatures` that are none, or that do not fill whole blocks: [`OptionError`]."""
    if values is None:
        return
    if set(values) != set(PARTS) or not all(_are_numbers(values[part]) for part in PARTS):
        raise OptionError(
            'A stored `confidence_temperatures` must be `{"greedy": [...], "sampled": [...]}`, lists of finite '
            "numbers, those of greedy above 0 and the others at least 0, but it is "
            f"{values!r:.120}. Fit them: `falcon-spec calibrate`."
        )
    if any(value == 0 for value in values["greedy"]):
        raise OptionError(f"Greedy `confidence_temperatures` must be above 0, but they are {values['greedy']}.")
    lengths = [len(values[part]) for part in PARTS]
    if lengths[0] != lengths[1] or not lengths[0] or lengths[0] % block_size:
        raise OptionError(
            "Both lists of `confidence_temperatures` must hold one for each position of whole blocks of "
            f"{block_size}, but they hold {lengths[0]} and {lengths[1]}. Fit them: `falcon-spec calibrate`."
        )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        for value in values
    )


def confidence_temperature(greedy: float, sampled: float, temperature: float | None) -> float:
    """At which temperature the softmax of a drafter's scores tells how likely the target takes a token.

    Scores are logits, less the temperature of the draws times the log of their noise. The target's scores spread about
    them: by `greedy` when it takes the best, and the more the hotter it draws, for hotter text is harder to foresee.
    The two add up as independent errors do; `docs/train_your_own.md` shows how well that fits.
    """
    return greedy if temperature is None else math.hypot(greedy, temperature * sampled)


def block_temperatures(
    stored: Mapping[str, Sequence[float]] | None, depth: int, block_size: int, temperature: float | None
) -> list[float]:
    """The temperatures of the positions of a block that starts below `depth`, for draws at `temperature`."""
    if stored is None:
        return [1.0 if temperature is None else temperature] * block_size
    start = min(depth, len(stored["greedy"]) - block_size)
    pairs = list(zip(stored["greedy"], stored["sampled"], strict=True))[start : start + block_size]
    return [confidence_temperature(greedy, sampled, temperature) for greedy, sampled in pairs]
