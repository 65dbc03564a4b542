"""Rates with confidence intervals from the runs of a benchmark. Pure arithmetic: runs in, numbers out."""

import random
from statistics import NormalDist
from typing import Any

from ..core.stats import GenerationStats
from .benchmark import BASELINE

NUM_RESAMPLES = 2000
Record = dict[str, Any]


def summarize(records: list[Record], block_sizes: dict[str, int], seed: int = 0) -> list[Record]:
    """One row for each arm, decoding and prompt set: speed-up with its interval, acceptance, and where the time goes."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["arm"], record["decoding"], record["set"]), []).append(record)
    rows = []
    for (arm, decoding, set_name), runs in groups.items():
        if arm != BASELINE:
            baseline = groups.get((BASELINE, decoding, set_name))
            rows.append(
                {"arm": arm, "decoding": decoding, "set": set_name, **_row(runs, baseline, block_sizes[arm], seed)}
            )
    return rows


def _row(runs: list[Record], baseline: list[Record] | None, block_size: int, seed: int) -> Record:
    stats = sum((pooled_stats(run) for run in runs), GenerationStats())
    steps = max(stats.num_steps, 1)
    row = {
        "num_prompts": len({run["prompt"] for run in runs}),
        "num_tokens": sum(run["num_tokens"] for run in runs),
        "repetition_rate": _mean([run["repetition_rate"] for run in runs]),
        "acceptance_length": stats.acceptance_length,
        "acceptance_length_interval": bootstrap(runs, pooled_acceptance_length, seed),
        "acceptance_by_depth": stats.acceptance_by_depth,
        "acceptance_by_block_position": stats.acceptance_by_block_position(block_size),
        "acceptance_histogram": stats.acceptance_histogram,
        "draft_seconds_per_step": stats.draft_seconds / steps,
        "verify_seconds_per_step": stats.verify_seconds / steps,
        "other_seconds_per_step": stats.other_seconds / steps,
        "overhead_share": stats.other_seconds / max(stats.total_seconds - stats.prefill_seconds, 1e-9),
    }
    return row | (_against(runs, baseline, stats, seed) if baseline else {})


def _against(runs: list[Record], baseline: list[Record], stats: GenerationStats, seed: int) -> Record:
    """Speed against the target alone, prompt by prompt, and the gate: what acceptance and cost of a step allow."""
    plain = {(run["prompt"], run["repeat"]): run for run in baseline}
    pairs = [(run, plain[run["prompt"], run["repeat"]]) for run in runs if (run["prompt"], run["repeat"]) in plain]
    prefill = stats.prefill_seconds / len(runs)
    plain_step = sum(run["seconds"] - prefill for run in baseline) / sum(run["num_tokens"] - 1 for run in baseline)
    step_cost = (stats.draft_seconds + stats.verify_seconds) / max(stats.num_steps, 1) / plain_step
    speedup = pooled_speedup(pairs)
    bound = stats.acceptance_length / step_cost
    return {
        "speedup": speedup,
        "speedup_interval": bootstrap(pairs, pooled_speedup, seed),
        "baseline_tokens_per_second": pooled_tokens_per_second([base for _, base in pairs]),
        "tokens_per_second": pooled_tokens_per_second([run for run, _ in pairs]),
        "plain_seconds_per_step": plain_step,
        "step_cost": step_cost,
        "gate": 0.9 * bound,
        "passes_gate": speedup >= 0.9 * bound,
        "num_identical": sum(run["token_ids"] == base["token_ids"] for run, base in pairs),
        "num_compared": len(pairs),
    }


def bootstrap(values: list[Any], statistic: Any, seed: int) -> tuple[float, float]:
    """95 % interval of `statistic` over resampled prompts."""
    draws = random.Random(seed)
    found = sorted(statistic(draws.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return found[int(0.025 * NUM_RESAMPLES)], found[int(0.975 * NUM_RESAMPLES) - 1]


def wilson_interval(num_hits: int, num_trials: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of a share: the score interval of E. B. Wilson, JASA 22 (1927), 209-212, without continuity correction.

    It holds near 0 and 1, where the usual interval shrinks to nothing: no hit in 200 trials still allows 1.9 %.

    Example:

    ```python
    >>> [round(bound, 4) for bound in wilson_interval(0, 200)]
    [0.0, 0.0188]

    ```
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, shrink = num_hits / num_trials, 1 + z**2 / num_trials
    center = (share + z**2 / (2 * num_trials)) / shrink
    spread = z / shrink * (share * (1 - share) / num_trials + z**2 / (4 * num_trials**2)) ** 0.5
    return max(center - spread, 0.0), min(center + spread, 1.0)


def pooled_stats(run: Record) -> GenerationStats:
    """The statistics stored with a run; JSON made strings of the histogram's keys."""
    stored = dict(run["speculation"])
    stored["acceptance_histogram"] = {int(key): count for key, count in stored["acceptance_histogram"].items()}
    return GenerationStats(**stored)


def pooled_acceptance_length(runs: list[Record]) -> float:
    """Tokens committed per step over all runs, bonus tokens included."""
    accepted = sum(run["speculation"]["num_accepted"] for run in runs)
    return 1 + accepted / max(sum(run["speculation"]["num_steps"] for run in runs), 1)


def pooled_speedup(pairs: list[tuple[Record, Record]]) -> float:
    """Ratio of tokens per second, both sides counted in token ids."""
    return pooled_tokens_per_second([run for run, _ in pairs]) / pooled_tokens_per_second([base for _, base in pairs])


def pooled_tokens_per_second(runs: list[Record]) -> float:
    """Tokens of all runs over seconds of all runs."""
    return sum(run["num_tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
