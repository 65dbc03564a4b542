"""Interleaved benchmarks: fair cells, exact resume, methods that fail, and rates that follow from the runs."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat import PLAIN_TEMPLATE, make_tokenizer
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.drafters.fingerprint import template_digest
from transformers_falcon_spec.errors import BenchmarkError, ConversationError, OptionError
from transformers_falcon_spec.evaluation import benchmark as benchmark_module
from transformers_falcon_spec.evaluation import summary
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import (
    BASELINE,
    Method,
    decoding_options,
    prompt_lookup,
    repetition_rate,
    stock_assistant,
    with_drafter,
)
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_stats, summarize

PROMPTS = [Prompt("sums", str(i), (("user", text),)) for i, text in enumerate(["one plus two", "four times"])]
NUM_RUNS = 2 * len(PROMPTS)  # of a method


@pytest.fixture
def benchmark() -> Benchmark:
    target = make_target()
    return Benchmark(
        target=target,
        tokenizer=make_tokenizer(),
        methods=[
            with_drafter("two", make_drafter(target, block_size=2)),
            prompt_lookup("lookup", 3),
        ],
        prompts=PROMPTS,
        decodings=["greedy", "temperature-0.7"],
        max_new_tokens=6,
    )


def keys_of(path: Path) -> list[str]:
    return [json.loads(line)["key"] for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def fail_from(monkeypatch: pytest.MonkeyPatch, method: str, num_calls: int) -> Callable[[], None]:
    """Let the arguments of a method raise from one call on."""
    original, calls = Method.arguments, {method: 0}

    def arguments(self: Method) -> dict[str, Any]:
        calls[self.name] = calls.get(self.name, 0) + 1
        if self.name == method and calls[method] > num_calls:
            raise RuntimeError("out of\nluck | 0x1")
        return original(self)

    monkeypatch.setattr(Method, "arguments", arguments)
    return lambda: monkeypatch.setattr(Method, "arguments", original)


def test_lossless_methods_write_the_same_text_on_every_prompt(benchmark: Benchmark, tmp_path: Path) -> None:
    with_assistant = [*benchmark.methods, stock_assistant("sps", make_target(seed=4))]
    records = replace(benchmark, methods=with_assistant).run(tmp_path / "runs.jsonl")

    texts: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for record in records:
        if (
            record["method"] in (BASELINE, "two") or record["decoding"] == "greedy"
        ):  # stock sampling draws in another order
            texts.setdefault((record["decoding"], record["prompt"]), set()).add(tuple(record["token_ids"]))
    assert len(records) == 4 * NUM_RUNS
    assert all(len(found) == 1 for found in texts.values())
    assert {record["method"] for record in records if record["speculation"] is None} == {BASELINE}
    assert all(record["prefill_seconds"] > 0 for record in records)


def test_the_methods_of_a_prompt_stand_beside_each_other_in_changing_order(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    benchmark.run(tmp_path / "runs.jsonl")

    keys = [key.split("|") for key in keys_of(tmp_path / "runs.jsonl")]
    groups = [keys[start : start + 3] for start in range(0, len(keys), 3)]
    assert all(len({tuple(key[2:]) for key in group}) == 1 for group in groups)
    assert len({tuple(key[1] for key in group) for group in groups}) > 1


def test_an_interrupted_benchmark_makes_only_the_missing_runs(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    benchmark.run(path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:20])  # killed while it wrote the sixth run

    resumed = benchmark.run(path)

    assert path.read_bytes().split(b"\n")[:5] == lines[:5]
    assert len(resumed) == len({row["key"] for row in resumed}) == 3 * NUM_RUNS


def test_runs_of_a_prompt_that_asks_something_else_are_made_anew(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    benchmark.run(path)
    changed = replace(PROMPTS[1], messages=(("user", "seven"),))

    records = replace(benchmark, prompts=[PROMPTS[0], changed]).run(path)

    assert len(keys_of(path)) == 3 * NUM_RUNS + 3 * NUM_RUNS // 2
    assert len(records) == 3 * NUM_RUNS


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("config", "confidence_temperatures", {"greedy": [0.5, 0.5]}),
        ("config", "sliding_window", 8),
        ("generation_config", "tune", False),
        ("generation_config", "verifier", "gumbel"),
    ],
)
def test_runs_of_a_drafter_with_other_options_are_not_taken_for_those_of_this_one(
    benchmark: Benchmark, tmp_path: Path, owner: str, name: str, value: Any
) -> None:
    path = tmp_path / "runs.jsonl"
    drafter = make_drafter(benchmark.target, block_size=2)
    alone = replace(benchmark, methods=[with_drafter("two", drafter)])
    alone.run(path)
    setattr(getattr(drafter, owner), name, value)

    with pytest.raises(OptionError, match="other weights or settings"):
        replace(alone, methods=[with_drafter("two", drafter)]).run(path)


def test_another_method_may_join_and_only_what_is_asked_for_is_returned(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    replace(benchmark, methods=benchmark.methods[:1]).run(path)

    records = replace(benchmark, methods=benchmark.methods[1:2], decodings=["greedy"]).run(path)

    assert {(record["method"], record["decoding"]) for record in records} == {
        (BASELINE, "greedy"),
        ("lookup", "greedy"),
    }
    assert len(keys_of(path)) == 2 * NUM_RUNS + len(PROMPTS)


def test_results_say_how_the_target_was_asked(benchmark: Benchmark, tmp_path: Path) -> None:
    commit = "c" * 40
    benchmark.target.config._commit_hash = commit

    outcome = benchmark.run(tmp_path / "runs.jsonl")

    conditions = {"revision": commit, "template": template_digest(benchmark.tokenizer)}
    assert [entry["conditions"] for entry in benchmark.describe(outcome)] == [conditions] * 3


def test_results_name_the_commits_of_their_runs(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, commit in enumerate(("ab", "cd"), start=1):
        monkeypatch.setattr(benchmark_module, "current_commit", lambda commit=commit: commit)
        outcome = replace(benchmark, prompts=PROMPTS[:number]).run(tmp_path / "runs.jsonl")

    assert [entry["commits"] for entry in benchmark.describe(outcome)] == [["ab", "cd"]] * 3


def test_runs_with_another_template_or_revision_are_not_mixed_in(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    benchmark.run(path)

    with pytest.raises(OptionError, match="must hold measurements under the same settings"):
        replace(benchmark, tokenizer=make_tokenizer(PLAIN_TEMPLATE.replace("<assistant>", "<system>"))).run(path)
    benchmark.target.config._commit_hash = "c" * 40
    with pytest.raises(OptionError, match="must hold measurements under the same settings"):
        benchmark.run(path)


def test_runs_of_another_drafter_or_target_are_not_mixed_in(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    benchmark.run(path)
    other = make_drafter(benchmark.target, block_size=2, draft_tree=DraftTree.chain(1).to_json())

    with pytest.raises(OptionError, match=r"must hold runs of the same methods, but those of `two`"):
        replace(benchmark, methods=[with_drafter("two", other)]).run(path)
    with pytest.raises(OptionError, match="must hold measurements under the same settings"):
        replace(benchmark, target=make_target(seed=9), methods=[]).run(path)
    with pytest.raises(OptionError, match=r"must hold measurements under the same settings"):
        replace(benchmark, max_new_tokens=9).run(path)


def test_a_method_that_raises_is_named_and_what_was_measured_is_kept(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    repair = fail_from(monkeypatch, "two", 1 + 2 * 2)  # a warm-up, and two calls for each of two runs

    with pytest.raises(BenchmarkError, match=r"`two` raised RuntimeError: out of\nluck"):
        benchmark.run(path)
    kept = keys_of(path)
    repair()

    assert sum("|two|" in key for key in kept) == 2
    assert len(benchmark.run(path)) == 3 * NUM_RUNS
    assert keys_of(path)[: len(kept)] == kept


def test_a_method_that_raises_when_warmed_up_makes_no_run(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(monkeypatch, "lookup", 0)

    with pytest.raises(BenchmarkError, match=r"`lookup` raised RuntimeError"):
        benchmark.run(tmp_path / "runs.jsonl")

    assert keys_of(tmp_path / "runs.jsonl") == []


def test_an_interrupt_is_no_failure(benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Method) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Method, "arguments", interrupted)

    with pytest.raises(KeyboardInterrupt):
        benchmark.run(tmp_path / "runs.jsonl")


def test_two_methods_of_one_name_are_refused(benchmark: Benchmark) -> None:
    with pytest.raises(OptionError, match=r"Each method needs a name of its own"):
        replace(benchmark, methods=[prompt_lookup("a"), prompt_lookup("a", 3)])
    with pytest.raises(OptionError, match=r"`target` is that of the target alone"):
        replace(benchmark, methods=[prompt_lookup(BASELINE)])


def test_a_prompt_too_long_is_refused_before_anything_runs(benchmark: Benchmark, tmp_path: Path) -> None:
    long = Prompt("sums", "long", (("user", "one plus two " * 200),), "sums.jsonl, line 4")

    with pytest.raises(ConversationError, match=r"sums\.jsonl, line 4: a prompt and its 6 new tokens must fit"):
        replace(benchmark, prompts=[*PROMPTS, long]).run(tmp_path / "runs.jsonl")
    assert not (tmp_path / "runs.jsonl").exists()


def _run(method: str, prompt: str, tokens: int, seconds: float, **stats: Any) -> dict[str, Any]:
    counts = {"num_steps": 4, "num_accepted": 4, "acceptance_histogram": {"1": 4}, "total_seconds": seconds, **stats}
    phases = {"draft_seconds": 0.1, "verify_seconds": 0.3, "prefill_seconds": 0.1}
    speculation = None if method == BASELINE else {**counts, **phases}
    common = {"target": "t", "decoding": "greedy", "set": "sums", "repetition_rate": 0.0}
    run = {"method": method, "prompt": prompt, "num_tokens": tokens, "seconds": seconds, "speculation": speculation}
    return {**run, **common, "prefill_seconds": 0.1, "token_ids": [1] * tokens}


def test_the_speed_up_is_the_ratio_of_tokens_per_second() -> None:
    records = [_run(BASELINE, p, 9, 1.7) for p in "ab"] + [_run("two", p, 9, 0.85) for p in "ab"]

    row = summarize(records)[0]

    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert row["decode_speedup"] == pytest.approx(1.6 / 0.75)
    assert row["acceptance_length_pooled"] == 2.0
    assert row["plain_seconds_per_step"] == pytest.approx((1.7 - 0.1) / 8)
    assert row["step_cost"] == pytest.approx((0.1 + 0.3) / 4 / 0.2)
    assert row["gate"] == pytest.approx(0.9 * 2.0 / 0.5)
    assert not row["passes_gate"]
    assert (row["num_identical"], row["num_compared"]) == (2, 2)


def test_lengths_are_pooled_over_steps_and_averaged_over_requests() -> None:
    long = _run("two", "b", 15, 1.0, num_steps=8, num_accepted=6, acceptance_histogram={"0": 2, "1": 6})

    row = summarize([_run("two", "a", 5, 1.0, num_steps=1, num_accepted=3, acceptance_histogram={"3": 1}), long])[0]

    assert row["acceptance_length_pooled"] == pytest.approx(1 + 9 / 9)
    assert row["acceptance_length_per_request"] == pytest.approx((4 + 1.75) / 2)
    assert row["accepted_drafts_per_step"] == pytest.approx(1)
    assert row["tokens_per_forward"] == pytest.approx(20 / 11)
    assert row["alpha"] == pytest.approx(9 / 20)


def test_without_a_baseline_there_is_acceptance_but_no_speed_up() -> None:
    row = summarize([_run("two", "a", 9, 0.85)])[0]

    assert row["acceptance_length_pooled"] == 2.0
    assert "speedup" not in row


def test_texts_of_one_token_have_no_speed_without_prefill_and_no_gate() -> None:
    one = {"num_steps": 0, "num_accepted": 0, "acceptance_histogram": {}}

    row = summarize([_run(BASELINE, "a", 1, 0.1), _run("two", "a", 1, 0.2, **one)])[0]

    assert row["speedup"] == pytest.approx(0.5)
    assert [row[key] for key in ("decode_speedup", "plain_seconds_per_step", "step_cost", "gate")] == [None] * 4


def test_the_alpha_of_measured_runs_is_the_share_of_kept_drafts(benchmark: Benchmark, tmp_path: Path) -> None:
    records = benchmark.run(tmp_path / "runs.jsonl")

    for row in summarize(records):
        runs = [record for record in records if all(record[key] == row[key] for key in ("method", "decoding"))]
        kept = sum(run["speculation"]["num_accepted"] for run in runs)
        tokens = sum(run["num_tokens"] for run in runs)
        if row["method"] == "two":
            assert row["alpha"] == pytest.approx(kept / tokens)
        else:  # what the first forward keeps of its draft is no step's
            assert row["alpha"] >= kept / tokens - 1e-9


def test_the_interval_holds_the_statistic_and_depends_on_the_seed_alone() -> None:
    values = [1.0, 2.0, 3.0, 4.0]

    low, high = bootstrap(values, lambda sample: sum(sample) / len(sample), seed=1)

    assert low < 2.5 < high
    assert (low, high) == bootstrap(values, lambda sample: sum(sample) / len(sample), seed=1)


@pytest.mark.parametrize("num_prompts", [5, 15])
def test_intervals_of_few_prompts_hold_the_truth_about_as_often_as_they_say(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "NUM_RESAMPLES", 500)
    draws = random.Random(1)
    num_held = 0
    for _ in range(300):
        values = [draws.gauss(2.0, 0.4) for _ in range(num_prompts)]
        low, high = bootstrap(values, lambda sample: sum(sample) / len(sample), seed=0)
        num_held += low <= 2.0 <= high

    assert 0.91 < num_held / 300 < 0.98  # plain percentiles: 0.84 of 5 prompts


def test_repetition_rate_counts_runs_seen_before() -> None:
    assert repetition_rate([1, 2, 3, 4, 5, 6]) == 0.0
    assert repetition_rate([1] * 7) == 0.75
    assert repetition_rate([1, 2]) == 0.0


def test_an_unknown_decoding_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"`decodings` must be some of .* but one is 'hot'"):
        decoding_options("hot")


def test_the_settings_of_a_benchmark_hold_the_number_of_threads(benchmark: Benchmark, tmp_path: Path) -> None:
    benchmark.run(tmp_path / "runs.jsonl")

    first = json.loads((tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["settings"]["threads"] == torch.get_num_threads()


def test_a_run_of_an_older_version_is_read_without_what_is_no_longer_counted() -> None:
    old = _run("one", "a", 5, 1.0, read_seconds=0.2)

    assert pooled_stats(old) == pooled_stats(_run("one", "a", 5, 1.0))
