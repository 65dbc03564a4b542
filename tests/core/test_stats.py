"""Counts and the rates derived from them."""

import json

import pytest

from transformers_falcon_spec import GenerationStats


def _recorded(*accepted: int, max_depth: int = 3) -> GenerationStats:
    stats = GenerationStats()
    for num_accepted in accepted:
        stats.record(num_nodes=6, max_depth=max_depth, num_accepted=num_accepted)
    return stats


def test_counts_exclude_root_and_bonus_token() -> None:
    stats = _recorded(0, 2, 3)

    assert (stats.num_steps, stats.num_drafted, stats.num_accepted) == (3, 15, 5)
    assert stats.acceptance_histogram == {0: 1, 2: 1, 3: 1}


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert _recorded(0, 2, 4).acceptance_length == 3.0
    assert GenerationStats().acceptance_length == 1.0


def test_acceptance_by_depth_is_conditional_on_the_depth_above() -> None:
    stats = _recorded(0, 1, 2, 3)

    assert stats.acceptance_by_depth == [3 / 4, 2 / 3, 1 / 2]


def test_joint_acceptance_is_over_all_steps() -> None:
    assert _recorded(0, 1, 2, 3).joint_acceptance_by_depth == [3 / 4, 2 / 4, 1 / 4]


def test_rows_are_counted_apart_and_together() -> None:
    stats = GenerationStats(rows=[GenerationStats(), GenerationStats()])
    stats.record(row=0, num_nodes=6, max_depth=3, num_accepted=3)
    stats.record(row=1, num_nodes=4, max_depth=2, num_accepted=0)
    stats.count_tokens([5, 2])

    first, second = stats.rows
    assert (first.num_accepted, second.num_accepted, stats.num_accepted) == (3, 0, 3)
    assert (first.num_tokens, second.num_tokens, stats.num_tokens) == (5, 2, 7)
    assert stats.acceptance_length == (first.acceptance_length + second.acceptance_length) / 2


def test_a_depth_that_was_not_offered_is_not_counted() -> None:
    stats = _recorded(1, max_depth=1)
    stats.record(num_nodes=1, max_depth=0, num_accepted=0)

    assert stats.offered_by_depth == [1]
    assert stats.acceptance_by_depth == [1.0]
    assert stats.num_steps == 2


def test_sum_is_what_one_run_over_both_would_record() -> None:
    first, second = _recorded(0, 2), _recorded(5, max_depth=5)
    first.total_seconds, second.total_seconds, first.notes, second.notes = 1.0, 2.0, ["a"], ["b", "a"]

    total = sum([first, second], GenerationStats())

    both = _recorded(0, 2)
    both.record(num_nodes=6, max_depth=5, num_accepted=5)
    both.total_seconds, both.notes = 3.0, ["a", "b"]
    assert total == both
    assert first == GenerationStats() + first  # the terms are left as they were


def test_other_seconds_are_what_the_phases_leave() -> None:
    stats = GenerationStats(
        num_tokens=8, prefill_seconds=1.0, draft_seconds=0.5, verify_seconds=2.0, total_seconds=4.0
    )

    assert stats.other_seconds == 0.5
    assert stats.tokens_per_second == 2.0
    assert GenerationStats().tokens_per_second == 0.0


def test_json_holds_counts_and_derived_rates() -> None:
    stats = _recorded(1, 2)

    stored = json.loads(json.dumps(stats.to_json()))

    assert stored["num_accepted"] == 3
    assert stored["acceptance_length"] == pytest.approx(2.5)
    assert stored["acceptance_by_depth"] == stats.acceptance_by_depth
    assert stored["tokens_per_second"] == 0.0


def test_what_is_printed_is_a_few_lines_without_lists_and_zeros() -> None:
    stats = _recorded(0, 2, 3)
    stats.num_tokens, stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds = 9, 0.25, 0.5, 1.0
    stats.total_seconds = 2.0
    stats.notes.append("The step is not captured: asked for.")

    assert str(stats).splitlines() == [
        "2.67 tokens a step: 9 tokens in 3 steps",
        "1.67 of 5.00 drafted tokens are kept a step",
        "kept by depth, of those whose parent was kept: 0.67 1.00 0.50",
        "2.00 s, 4.5 tokens a second: prefill 0.25, draft 0.50, verify 1.00, other 0.25",
        "The step is not captured: asked for.",
    ]


def test_counts_of_nothing_and_of_rows_can_be_printed() -> None:
    assert str(GenerationStats()).splitlines() == [
        "1.00 tokens a step: 0 tokens in 0 steps",
        "0.00 of 0.00 drafted tokens are kept a step",
        "kept by depth, of those whose parent was kept: -",
    ]
    assert "0 tokens of 2 rows in 0 steps" in str(GenerationStats(rows=[GenerationStats(), GenerationStats()]))
