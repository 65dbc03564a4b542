"""Speed-up over the target alone with its interval, from runs in pairs: the same prompt with and without a drafter."""

from typing import Any

import datasets
import evaluate

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_speedup, pooled_tokens_per_second

INPUTS = """
Args:
    num_tokens, seconds: New tokens, counted in token ids, and seconds of each run with the drafter.
    baseline_num_tokens, baseline_seconds: The same of the target alone on the same prompt.
    seed: Seed of the resampling behind the interval.

Returns:
    speedup: Ratio of tokens per second, with speedup_interval (95 %, prompts resampled in pairs).
    tokens_per_second, baseline_tokens_per_second: Over all runs of each side.
"""


class Speedup(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
    """The speed-up pooled over runs: each side is tokens of all runs over seconds of all runs."""

    def _info(self) -> Any:
        columns = {"num_tokens": "int64", "seconds": "float64"}
        names = {f"{side}{name}": kind for side in ("", "baseline_") for name, kind in columns.items()}
        return evaluate.MetricInfo(
            description="Tokens per second with a drafter over tokens per second of the target alone.",
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({name: datasets.Value(kind) for name, kind in names.items()}),
        )

    def _compute(
        self,
        num_tokens: list[int],
        seconds: list[float],
        baseline_num_tokens: list[int],
        baseline_seconds: list[float],
        seed: int = 0,
    ) -> dict[str, Any]:
        if not num_tokens:
            raise OptionError("A metric must be computed over at least one row, but there is none.")
        runs = _runs(num_tokens, seconds)
        baseline = _runs(baseline_num_tokens, baseline_seconds)
        pairs = list(zip(runs, baseline, strict=True))
        return {
            "speedup": pooled_speedup(pairs),
            "speedup_interval": bootstrap(pairs, pooled_speedup, seed),
            "tokens_per_second": pooled_tokens_per_second(runs),
            "baseline_tokens_per_second": pooled_tokens_per_second(baseline),
        }


def _runs(num_tokens: list[int], seconds: list[float]) -> list[dict[str, Any]]:
    runs = [{"num_tokens": num, "seconds": time} for num, time in zip(num_tokens, seconds, strict=True)]
    for row, run in enumerate(runs):
        if not all(value is not None and 0 < value < float("inf") for value in run.values()):
            raise OptionError(f"A run must have tokens and seconds, both positive, but row {row} has {run}.")
    return runs
