"""Watching steps: observers see what was drafted and kept, drafts say how likely each node seemed, and nobody else pays for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.families import VOCAB_SIZE
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import Draft, DraftTree, SpeculationConfig
from transformers_falcon_spec.core.tree_growth import TreeGrowth
from transformers_falcon_spec.generation.loop import SpeculativeDecoding
from transformers_falcon_spec.generation.output import observe_steps

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "falcon, two passes": lambda target: make_drafter(target, block_size=1),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
    "medusa": lambda target: make_medusa(target, num_heads=2),
}
# All tokens below the root, and all below the likeliest of those.
ALL_TOKENS = DraftTree.from_lists([-1] + [0] * VOCAB_SIZE + [1] * VOCAB_SIZE).to_json()


def watched(target: Any, drafter: Any, **options: Any) -> list[Draft]:
    """The drafts of all steps."""
    drafts: list[Draft] = []
    with observe_steps(lambda draft, _: drafts.append(draft)):
        runs.drafted(target, drafter, max_new_tokens=6, **options)
    return drafts


@pytest.mark.parametrize("verifier", ["token_matching", "recursive_rejection"])
@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_probabilities_of_all_tokens_after_a_node_add_up_to_one(
    kind: str, options: dict[str, Any], verifier: str
) -> None:
    target = make_target().double()
    drafter = DRAFTERS[kind](target)
    drafter.generation_config = SpeculationConfig(
        tune=False, draft_tree=ALL_TOKENS, dynamic_tree=False, verifier=verifier
    )

    drafts = watched(target, drafter, **options)

    whole = [draft for draft in drafts if draft.token_ids.shape[1] == 1 + 2 * VOCAB_SIZE]
    assert whole
    is_drawn = verifier != "token_matching" and bool(options)
    for draft in whole:
        for children in draft.node_probs[0, 1:].split(VOCAB_SIZE):
            assert float(children.sum()) == pytest.approx(1, abs=1e-4)
            assert is_drawn or children.sort(descending=True).values.equal(children)  # drawn ones come in any order
            assert children.max() > 2 / VOCAB_SIZE  # not just anything that adds up
        assert draft.node_probs[0, 0] == 1


@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["falcon", "falcon, two passes", "eagle"])
def test_the_nodes_of_a_grown_tree_are_as_likely_as_those_of_a_static_one(kind: str, options: dict[str, Any]) -> None:
    target = make_target().double()
    drafter = DRAFTERS[kind](target)
    drafter.generation_config = SpeculationConfig(tune=False, draft_tree=ALL_TOKENS, dynamic_tree=False)
    static = watched(target, drafter, **options)[0]
    drafter.generation_config = SpeculationConfig(
        tune=False, dynamic_tree=True, tree_top_k=3, tree_depth=2, num_tree_nodes=6
    )

    grown = watched(target, drafter, **options)[0]

    known = probs_by_path(static)
    found = probs_by_path(grown)
    common = [path for path in found if path in known]
    assert len(common) >= 4
    assert [found[path] for path in common] == pytest.approx([known[path] for path in common], abs=1e-4)


def probs_by_path(draft: Draft) -> dict[tuple[int, ...], float]:
    """The probability of each node by the tokens on the way to it."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in list(zip(draft.parents[0].tolist(), draft.token_ids[0].tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return dict(zip(paths, draft.node_probs[0].tolist(), strict=True))


def test_observers_see_every_step_and_change_nothing() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    tokens: list[int] = []

    with observe_steps(lambda _, paths: tokens.extend(paths[0].token_ids)):
        pair = runs.both(target, drafter, **SAMPLING)

    pair.assert_equal()
    prompt_len = pair.drafted.sequences.shape[1] - 24
    assert tokens == pair.drafted.sequences[0, prompt_len + 1 :].tolist()  # the prefill gave the first


def test_without_an_observer_no_chances_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter = make_drafter(target, block_size=2)
    drafts: list[Draft] = []
    record = SpeculativeDecoding.record

    def noted(self: SpeculativeDecoding, draft: Draft, *args: Any, **kwargs: Any) -> None:
        drafts.append(draft)
        record(self, draft, *args, **kwargs)

    monkeypatch.setattr(SpeculativeDecoding, "record", noted)
    with observe_steps(lambda *_: None):
        pass  # over before the call

    runs.drafted(target, drafter)

    assert drafts
    assert all(draft.node_probs is None for draft in drafts)


def test_rows_without_room_have_no_probability_below_the_root() -> None:
    grown = TreeGrowth(torch.tensor([[1], [2]]), torch.tensor([1, 0]))

    grown.expand(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[[3]], [[4]]]), torch.full((2, 1, 1), 0.5).log())

    assert grown.best_node_probs(5).tolist() == [[1.0, 0.5], [1.0, 0.0]]
