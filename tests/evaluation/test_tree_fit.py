"""Fitting trees: ranks are counted by the decoding loop where they can be known, and bad settings are refused."""

import itertools
from typing import Any

import pytest
import torch

from tests.chat import make_tokenizer
from tests.drafters.medusa.makers import make_medusa
from tests.families import VOCAB_SIZE
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import Draft, DraftTree, LookaheadDrafter
from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.errors import OptionError, TargetError
from transformers_falcon_spec.evaluation import tree_fit
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.evaluation.tree_fit import RankLog, TreeFit, acceptance, fit_result, measuring_tree
from transformers_falcon_spec.generation.probe import Capability

PROMPT = Prompt("sums", "a", (("user", "one plus two"),))
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def a_draft(parents: list[int], token_ids: list[int]) -> Draft:
    return Draft(torch.tensor([token_ids]), torch.tensor([parents]))


def test_ranks_are_counted_below_kept_nodes_with_all_their_children() -> None:
    log = RankLog(num_ranks=2)
    draft = a_draft([-1, 0, 0, 1, 1, 2], [5, 10, 11, 12, 13, 14])

    log(draft, [AcceptedPath((0, 1), (10, 99))])  # rank 0, then a miss
    log(draft, [AcceptedPath((0, 2, 5), (11, 14, 7))])  # rank 1, then a node of one child, then a leaf
    log(draft, [AcceptedPath((0, 1, 4), (10, 13, 7))])  # rank 0, then rank 1
    log(draft, [AcceptedPath((0,), (10,))])  # ends the text: nothing below was asked for

    assert log.steps == [[0, 2], [1, None, None], [0, 1, None], [0]]
    assert log.counts(depth=3) == [[2, 1, 0], [0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(("depth", "num_ranks", "width"), [(1, 4, 3), (3, 2, 8), (3, 3, 2), (4, 2, 1)])
def test_the_measuring_tree_holds_all_ranks_below_the_nodes_of_best_ranks(
    depth: int, num_ranks: int, width: int
) -> None:
    tree = measuring_tree(depth, num_ranks, width)

    expected, level = [()], [()]
    for _ in range(depth):
        expanded = sorted(level, key=sum)[:width]
        level = [(*path, rank) for path in expanded for rank in range(num_ranks)]
        expected += level
    ranks = tree.ranks[0].tolist()
    assert [tuple(ranks[above] for above in tree.path_to(node)[1:]) for node in range(len(tree))] == expected


def test_acceptance_falls_with_rank_and_takes_nothing_for_certain() -> None:
    rates = acceptance([[[6, 1, 2, 0], [0, 0, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]])

    hits = [7.5, 2.5, 1.5]  # sorted, with half a hit each; the misses have half a hit, too
    assert rates.tolist() == [pytest.approx([hit / 12 for hit in hits]), pytest.approx([0.25] * 3)]


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["falcon", "medusa"])
def test_what_is_counted_is_how_likely_the_drafter_held_the_targets_token(kind: str, options: dict[str, Any]) -> None:
    target = make_target(max_position_embeddings=128).double()
    drafter = make_drafter(target, block_size=2) if kind == "falcon" else make_medusa(target, num_heads=2)
    fit = TreeFit(target, make_tokenizer(), drafter, num_ranks=VOCAB_SIZE, width=1)

    log = fit.watch(PROMPT, options, 24, seed=0)

    whole = [ranks for ranks in log.steps if ranks[0] is not None]
    assert len(whole) > 4
    assert all(ranks[0] < VOCAB_SIZE for ranks in whole)  # every token is offered, so none is missed
    assert sum(map(len, log.steps)) == 23  # the prefill gave the first
    assert len({ranks[0] for ranks in whole}) > 2
    assert drafter.generation_config.draft_tree is None  # it stays as it is


def test_the_result_compares_with_the_present_tree() -> None:
    target = make_target(max_position_embeddings=128)
    fit = TreeFit(target, make_tokenizer(), make_drafter(target, block_size=2), num_ranks=3)

    result = fit_result(fit, [[[60, 20, 10, 10], [40, 5, 5, 50]]], num_nodes=5)

    rates = torch.tensor(result["acceptance"], dtype=torch.double)
    tree = DraftTree.from_json(result["draft_tree"])
    assert sorted(tree.path_to(node) for node in range(5)) == sorted([(0,), (0, 1), (0, 1, 2), (0, 3), (0, 4)])
    assert result["expected_acceptance_length"] == pytest.approx(tree.expected_length(rates))
    assert result["present_expected_acceptance_length"] == pytest.approx(1 + rates[0, 0] + rates[0, 0] * rates[1, 0])
    assert (result["num_asked"], result["present_num_nodes"]) == ([100, 100], 3)


def test_a_present_tree_beyond_what_was_measured_is_not_compared() -> None:
    target = make_target(max_position_embeddings=128)
    drafter = make_drafter(target, block_size=2, draft_tree=DraftTree.from_lists([-1, 0, 0, 0]).to_json())
    fit = TreeFit(target, make_tokenizer(), drafter, num_ranks=2)

    result = fit_result(fit, [[[60, 30, 10], [40, 10, 50]]], num_nodes=3)

    assert result["present_expected_acceptance_length"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_passes": 9},
            r"must have at most 512 nodes, but 18 depths of 10 ranks below 6 nodes each make more\. Lower",
        ),
        (
            {"num_ranks": 98, "width": 1},
            r"`draft_tree` and `tree_top_k` ask for the 98 best tokens of a position, .* knows 97",
        ),
        (
            {"num_passes": 30, "num_ranks": 2, "width": 1},
            r"end within the target's context of 48 tokens, .* depth 60\.",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    target = make_target(max_position_embeddings=48)

    with pytest.raises(OptionError, match=message):
        TreeFit(target, make_tokenizer(), make_drafter(target, block_size=2), **settings).watch(
            PROMPT, {"do_sample": False}, 4, seed=0
        )


def test_a_drafter_without_static_trees_is_refused() -> None:
    target = make_target()

    with pytest.raises(OptionError, match="must draft static trees, but a `LookaheadDrafter` has none"):
        TreeFit(target, make_tokenizer(), LookaheadDrafter.from_target(target))


def test_a_target_that_verifies_chains_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr(tree_fit, "probe", lambda _: Capability("chain", reason="a tree is read wrongly"))

    with pytest.raises(TargetError, match=r"A tree needs a target that verifies trees, but .* Draft a chain\."):
        TreeFit(target, make_tokenizer(), make_drafter(target, block_size=2))


def test_a_best_first_tree_keeps_what_was_expected_of_it_on_the_steps_that_it_was_fitted_to() -> None:
    steps = [[0, 1, 2], [0, 0, 3], [1, 0, 3], [3], [0, 3], [2, 3], [0, 0, 0], [1, 3]]
    log = RankLog(num_ranks=3)
    log.steps = [*steps, [None]]  # type: ignore[list-item]
    counts = torch.tensor(log.counts(depth=3), dtype=torch.double)
    rates = counts[:, :-1] / counts.sum(-1, keepdim=True)

    length = DraftTree.best_first(rates.sort(descending=True).values, 40).expected_length(
        rates.sort(descending=True).values
    )

    num_kept = [len(list(itertools.takewhile(lambda rank: rank < 3, step))) for step in steps]
    assert length == pytest.approx(1 + sum(num_kept) / len(steps))  # a tree of all nodes keeps all
