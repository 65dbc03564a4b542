"""Trees that no drafter could draft are refused before anything is read, by every kind of drafter."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import runs
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree, SpeculationConfig
from transformers_falcon_spec.errors import DraftTreeError, OptionError

DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
    "medusa": lambda target: make_medusa(target, num_heads=2),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree.chain(40), r"end within the target's context of 40 tokens, but the drafter's have up to 41 nodes and reach depth 40"),
        (DraftTree.from_lists([-1, 0], [-1, 97]), r"the 98 best tokens of a position, but the drafter knows 97\. Take a narrower"),
    ],
    ids=["deep", "wide"],
)  # fmt: skip
def test_trees_that_could_never_be_drafted_whole_are_refused(kind: str, tree: DraftTree, message: str) -> None:
    target = make_target(max_position_embeddings=40)
    drafter, before = DRAFTERS[kind](target), runs.traces(target)
    drafter.generation_config = SpeculationConfig(draft_tree=tree.to_json())

    with pytest.raises(OptionError, match=message):
        runs.drafted(target, drafter, max_new_tokens=4)

    assert runs.traces(target) == before


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_stored_tree_of_too_many_nodes_is_refused_wherever_it_is_stored(kind: str) -> None:
    drafter = DRAFTERS[kind](make_target())
    tree = DraftTree.from_lists([-1] + [0] * 520).to_json()
    message = "must have at most 512 nodes, but it has 521"

    with pytest.raises(DraftTreeError, match=message):
        SpeculationConfig(draft_tree=tree)
    with pytest.raises(DraftTreeError, match=message):
        type(drafter.config)(**{**drafter.config.to_dict(), "draft_tree": tree})
    drafter.config.draft_tree = tree
    with pytest.raises(DraftTreeError, match=message):
        runs.drafted(make_target(), drafter, max_new_tokens=4)


@pytest.mark.parametrize("options", [{"tree_depth": 40}, {"num_tree_nodes": 513}], ids=str)
@pytest.mark.parametrize("kind", ["falcon", "eagle"])
def test_trees_that_would_grow_too_far_are_refused(kind: str, options: dict[str, int]) -> None:
    target = make_target(max_position_embeddings=40)
    drafter = DRAFTERS[kind](target)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, **options)

    with pytest.raises(OptionError, match=r"but the drafter's have up to .* nodes and reach depth"):
        runs.drafted(target, drafter, max_new_tokens=4)


@pytest.mark.parametrize("depth", [1, 39])
def test_a_tree_that_ends_within_the_context_is_drafted(depth: int) -> None:
    target = make_target(max_position_embeddings=40).double()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(draft_tree=DraftTree.chain(depth).to_json())

    runs.informed(target, drafter, max_new_tokens=8).assert_equal()
