"""Interleaved benchmarks: fair cells, exact resume, and rates that follow from the runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chat import make_tokenizer
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.benchmark import BASELINE, Benchmark
from transformers_falcon_spec.evaluation.decoding import decoding_options, repetition_rate
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.evaluation.summary import bootstrap, summarize

PROMPTS = [Prompt("sums", str(i), (("user", text),)) for i, text in enumerate(["one plus two", "three", "four times"])]


@pytest.fixture
def benchmark() -> Benchmark:
    target = make_target()
    return Benchmark(
        target=target,
        tokenizer=make_tokenizer(),
        drafters={"two": make_drafter(target, block_size=2), "three": make_drafter(target, block_size=3)},
        prompts=PROMPTS,
        decodings=["greedy", "temperature-0.7"],
        max_new_tokens=8,
    )


def test_all_arms_write_the_same_text_on_every_prompt(benchmark: Benchmark, tmp_path: Path) -> None:
    records = benchmark.run(tmp_path / "runs.jsonl")

    texts: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for record in records:
        texts.setdefault((record["decoding"], record["prompt"]), set()).add(tuple(record["token_ids"]))
    assert len(records) == 3 * 2 * len(PROMPTS)
    assert all(len(found) == 1 for found in texts.values())


def test_an_interrupted_benchmark_makes_only_the_missing_runs(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    benchmark.run(path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:20])  # killed while it wrote the sixth run

    resumed = benchmark.run(path)

    assert path.read_bytes().split(b"\n")[:5] == lines[:5]
    assert len(resumed) == len({row["key"] for row in resumed}) == 3 * 2 * len(PROMPTS)


def test_runs_of_another_drafter_are_not_mixed_in(benchmark: Benchmark, tmp_path: Path) -> None:
    benchmark.run(tmp_path / "runs.jsonl")
    other = make_drafter(benchmark.target, block_size=2, draft_tree=DraftTree.chain(1).to_json())

    with pytest.raises(OptionError, match=r"must hold measurements under the same settings"):
        replace(benchmark, drafters={"two": other}).run(tmp_path / "runs.jsonl")


def _run(arm: str, prompt: str, tokens: int, seconds: float, **stats: Any) -> dict[str, Any]:
    counts = {"num_steps": 4, "num_accepted": 4, "acceptance_histogram": {"1": 4}, "total_seconds": seconds, **stats}
    phases = {"draft_seconds": 0.1, "verify_seconds": 0.3, "prefill_seconds": 0.1}
    speculation = None if arm == BASELINE else {**counts, **phases}
    common = {"decoding": "greedy", "set": "sums", "repeat": 0, "repetition_rate": 0.0, "token_ids": [1] * tokens}
    run = {"arm": arm, "prompt": prompt, "num_tokens": tokens, "seconds": seconds, "speculation": speculation}
    return {**run, **common}


def test_the_speed_up_is_the_ratio_of_tokens_per_second() -> None:
    records = [_run(BASELINE, p, 9, 1.7) for p in "ab"] + [_run("two", p, 9, 0.85) for p in "ab"]

    row = summarize(records, {"two": 2})[0]

    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert row["acceptance_length"] == 2.0
    assert row["plain_seconds_per_step"] == pytest.approx((1.7 - 0.1) / 8)
    assert row["step_cost"] == pytest.approx((0.1 + 0.3) / 4 / 0.2)
    assert row["gate"] == pytest.approx(0.9 * 2.0 / 0.5)
    assert (row["num_identical"], row["num_compared"]) == (2, 2)


def test_without_a_baseline_there_is_acceptance_but_no_speed_up() -> None:
    row = summarize([_run("two", "a", 9, 0.85)], {"two": 2})[0]

    assert row["acceptance_length"] == 2.0
    assert "speedup" not in row


def test_the_interval_holds_the_statistic_and_depends_on_the_seed_alone() -> None:
    values = [1.0, 2.0, 3.0, 4.0]

    low, high = bootstrap(values, lambda sample: sum(sample) / len(sample), seed=1)

    assert low < 2.5 < high
    assert (low, high) == bootstrap(values, lambda sample: sum(sample) / len(sample), seed=1)


def test_repetition_rate_counts_runs_seen_before() -> None:
    assert repetition_rate([1, 2, 3, 4, 5, 6]) == 0.0
    assert repetition_rate([1] * 7) == 0.75
    assert repetition_rate([1, 2]) == 0.0


def test_an_unknown_decoding_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"`decodings` must be some of .* but one is 'hot'"):
        decoding_options("hot")
