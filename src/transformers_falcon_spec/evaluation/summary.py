"""Rates with confidence intervals, computed from the runs of a benchmark, and results files that hold them."""

import json
import random
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from ..core.stats import GenerationStats
from ..errors import OptionError
from .methods import BASELINE, DECODINGS

NUM_RESAMPLES = 2000
Record = dict[str, Any]
_group_of = itemgetter("target", "method", "decoding", "set")


def summarize(records: list[Record], seed: int = 0) -> list[Record]:
    """One row for each target, method, decoding and prompt set: speed-up, acceptance, and where the time goes.

    `docs/results.md` gives the formula of each number.

    Args:
        records (`list[dict]`): Runs of `Benchmark`.
        seed (`int`): Seed of the intervals.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(_group_of(record), []).append(record)

    rows = []
    for (target, method, decoding, set_name), runs in groups.items():
        if method == BASELINE:
            continue

        row = {
            "target": target,
            "method": method,
            "decoding": decoding,
            "set": set_name,
            "num_runs": len(runs),
        }
        baseline = groups.get((target, BASELINE, decoding, set_name))
        rows.append(row | _row(runs, baseline, seed))

    return rows


def _row(runs: list[Record], baseline: list[Record] | None, seed: int) -> Record:
    by_run = list(map(pooled_stats, runs))
    stats = sum(by_run, GenerationStats())
    steps = max(stats.num_steps, 1)
    num_tokens = _total(runs, "num_tokens")
    num_forwards = len(runs) + stats.num_steps  # a prefill a run
    row = {
        "num_prompts": len({run["prompt"] for run in runs}),
        "num_tokens": num_tokens,
        "repetition_rate": _mean(runs, "repetition_rate"),
        "acceptance_length_pooled": stats.acceptance_length,
        "acceptance_length_pooled_interval": bootstrap(runs, pooled_acceptance_length, seed),
        "acceptance_length_per_request": fmean(each.acceptance_length for each in by_run),
        "accepted_drafts_per_step": stats.num_accepted / steps,
        "tokens_per_forward": num_tokens / num_forwards,
        "alpha": 1 - num_forwards / num_tokens,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "joint_acceptance_by_depth": stats.joint_acceptance_by_depth,
        "acceptance_histogram": stats.acceptance_histogram,
        "prefill_seconds": _mean(runs, "prefill_seconds"),
        "draft_seconds_per_step": stats.draft_seconds / steps,
        "verify_seconds_per_step": stats.verify_seconds / steps,
        "other_seconds_per_step": stats.other_seconds / steps,
        "overhead_share": stats.other_seconds / max(stats.total_seconds - stats.prefill_seconds, 1e-9),
    }

    if baseline:
        row |= _compare(runs, baseline, stats, seed)

    return row


def _compare(runs: list[Record], baseline: list[Record], stats: GenerationStats, seed: int) -> Record:
    """The speed-up over the target alone, prompt by prompt, and the gate: what acceptance and step cost allow."""
    plain = {run["prompt"]: run for run in baseline}
    pairs = [(run, plain[run["prompt"]]) for run in runs]
    own, alone = zip(*pairs, strict=True)
    plain_rate = decode_tokens_per_second(alone)
    speedup = pooled_speedup(pairs)
    step_seconds = (stats.draft_seconds + stats.verify_seconds) / max(stats.num_steps, 1)
    step_cost = step_seconds * plain_rate or None  # None if no text is longer than a token
    gate = 0.9 * stats.acceptance_length / step_cost if step_cost else None

    return {
        "speedup": speedup,
        "speedup_interval": bootstrap(pairs, pooled_speedup, seed),
        "decode_speedup": decode_tokens_per_second(own) / plain_rate if plain_rate else None,
        "baseline_tokens_per_second": pooled_tokens_per_second(alone),
        "tokens_per_second": pooled_tokens_per_second(own),
        "baseline_prefill_seconds": _mean(alone, "prefill_seconds"),
        "plain_seconds_per_step": 1 / plain_rate if plain_rate else None,
        "step_cost": step_cost,
        "gate": gate,
        "passes_gate": gate is not None and speedup >= gate,
        "num_identical": sum(run["token_ids"] == base["token_ids"] for run, base in pairs),
        "num_compared": len(pairs),
    }


def read_result(path: Path) -> Record:
    """Read a results file of `falcon-spec bench`; other files are an [`OptionError`]."""
    must = f"`{path}` must be a results file of `falcon-spec bench`, but"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{must} it is read with {type(error).__name__}: {error}. Measure again.") from None

    if not isinstance(result, dict) or not {"provenance", "methods", "rows"} <= result.keys():
        raise OptionError(f"{must} it is another kind of file. Measure again.")

    return result


def last_evaluation(curve: Sequence[Record]) -> Record:
    """The newest metrics with accuracies in the curve of a training; empty where there are none."""
    return next((row for row in reversed(curve) if "eval_accuracy_at_1" in row), {})


def changes_greedy_text(row: Record) -> bool:
    """Whether greedy decoding wrote other text than the target alone; sampling with a stock method may."""
    is_greedy = not DECODINGS[row["decoding"]]["do_sample"]
    return is_greedy and row.get("num_identical") != row.get("num_compared")


def bootstrap(values: list[Any], statistic: Any, seed: int) -> tuple[float, float]:
    """The 95 % interval of `statistic` over resampled prompts.

    Of few prompts it takes percentiles further out, for resamples of them differ less than prompts do: the expanded
    percentile interval (T. Hesterberg, arXiv 1411.5279).
    """
    draws = random.Random(seed)
    found = sorted(statistic(draws.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    num_beyond = int(_share_beyond(len(values)) * NUM_RESAMPLES)
    return found[num_beyond], found[-1 - num_beyond]


def _share_beyond(num_values: int) -> float:
    """The share of resamples beyond each end of the interval, 0.025 where there are many values."""
    freedom = max(num_values - 1, 1)
    z = NormalDist().inv_cdf(0.975)
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # quantile of t
    return 1 - NormalDist().cdf(student * (num_values / freedom) ** 0.5)


def wilson_interval(num_hits: int, num_trials: int, level: float = 0.95) -> tuple[float, float]:
    """The score interval of a share (E. B. Wilson, JASA 22 (1927), 209-212), without continuity correction.

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
    """The statistics that are stored with a run, in which JSON made strings of the histogram's keys.

    A run of an older version may have numbers that are no longer counted; they are left out.
    """
    stored = {
        name: value for name, value in run["speculation"].items() if name in GenerationStats.__dataclass_fields__
    }
    stored["acceptance_histogram"] = {int(key): count for key, count in stored["acceptance_histogram"].items()}
    return GenerationStats(**stored)


def pooled_acceptance_length(runs: list[Record]) -> float:
    """Mean tokens of a step over all runs, bonus tokens included."""
    counts = list(map(itemgetter("speculation"), runs))
    return 1 + _total(counts, "num_accepted") / max(_total(counts, "num_steps"), 1)


def pooled_speedup(pairs: list[tuple[Record, Record]]) -> float:
    """Ratio of tokens per second, both sides counted in token ids."""
    own, alone = zip(*pairs, strict=True)
    return pooled_tokens_per_second(own) / pooled_tokens_per_second(alone)


def pooled_tokens_per_second(runs: Sequence[Record]) -> float:
    """Tokens of all runs over seconds of all runs."""
    return _total(runs, "num_tokens") / _total(runs, "seconds")


def decode_tokens_per_second(runs: Sequence[Record]) -> float:
    """Tokens after the first one, over the seconds that are not prefill; 0 where there are no such tokens."""
    longer = [run for run in runs if run["num_tokens"] > 1]
    if not longer:
        return 0.0

    seconds = _total(longer, "seconds") - _total(longer, "prefill_seconds")
    return (_total(longer, "num_tokens") - len(longer)) / seconds


def _total(records: Sequence[Record], name: str) -> float:
    return sum(map(itemgetter(name), records))


def _mean(runs: Sequence[Record], name: str) -> float:
    return fmean(map(itemgetter(name), runs))
