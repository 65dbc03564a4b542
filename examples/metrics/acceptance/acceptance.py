"""Acceptance length with its interval, and acceptance rate, from the counts of `out.speculation`."""

from typing import Any

import datasets
import evaluate

from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_acceptance_length

INPUTS = """
Args:
    num_steps: Steps of each text.
    num_accepted: Draft tokens kept, without roots and bonus tokens.
    num_drafted: Draft tokens sent to the target.
    seed: Seed of the resampling behind the interval.

Returns:
    acceptance_length: 1 + accepted / steps over all texts, with acceptance_length_interval (95 %, over texts).
    acceptance_rate: accepted / drafted; comparable between chains only, since nodes of a tree exclude each other.
"""


class Acceptance(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
    """The acceptance pooled over texts: those with more steps count for more."""

    def _info(self) -> Any:
        counts = ("num_steps", "num_accepted", "num_drafted")
        return evaluate.MetricInfo(
            description="Tokens committed per step, and the share of drafted tokens that is kept.",
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({name: datasets.Value("int64") for name in counts}),
        )

    def _compute(
        self, num_steps: list[int], num_accepted: list[int], num_drafted: list[int], seed: int = 0
    ) -> dict[str, Any]:
        if not num_steps:
            raise OptionError("A metric must be computed over at least one row, but there is none.")
        for row, counts in enumerate(zip(num_steps, num_accepted, num_drafted, strict=True)):
            _check(row, *counts)
        stats = GenerationStats(num_steps=sum(num_steps), num_accepted=sum(num_accepted), num_drafted=sum(num_drafted))
        runs = [
            {"speculation": {"num_steps": steps, "num_accepted": accepted}}
            for steps, accepted in zip(num_steps, num_accepted, strict=True)
        ]
        return {
            "acceptance_length": stats.acceptance_length,
            "acceptance_length_interval": bootstrap(runs, pooled_acceptance_length, seed),
            "acceptance_rate": stats.num_accepted / max(stats.num_drafted, 1),
        }


def _check(row: int, num_steps: int | None, num_accepted: int | None, num_drafted: int | None) -> None:
    counts = (num_steps, num_accepted, num_drafted)
    known = [count for count in counts if count is not None]
    is_whole = (
        len(known) == len(counts) and min(known) >= 0 and known[1] <= known[2] and not (known[2] and not known[0])
    )
    if not is_whole:
        raise OptionError(
            "A text must have counts of at least 0, no more tokens accepted than drafted, and none drafted "
            f"without steps, but row {row} has {num_steps} steps, {num_accepted} accepted and {num_drafted} drafted."
        )
