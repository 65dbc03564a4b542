"""Options: their own and inherited ones, checked when set, kept with the drafter."""

from pathlib import Path

import pytest
from transformers import GenerationConfig

from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree, SpeculationConfig
from transformers_falcon_spec.errors import DraftTreeError, OptionError

TREE = {"parents": [-1, 0, 0, 1], "ranks": [-1, 0, 1, 0]}


def test_options_of_generation_config_are_taken_too() -> None:
    config = SpeculationConfig(draft_tree=TREE, num_assistant_tokens=7)

    assert isinstance(config, GenerationConfig)
    assert (config.draft_tree, config.num_assistant_tokens) == (TREE, 7)


def test_unknown_options_are_refused_by_name() -> None:
    message = r"`SpeculationConfig` has no option `draft_trees`, `depth`\. Options of its own: `draft_tree`"
    with pytest.raises(OptionError, match=message):
        SpeculationConfig(draft_trees=TREE, depth=3)


def test_an_option_that_is_set_under_an_unknown_name_is_refused_before_a_text_is_written() -> None:
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config.num_tre_nodes = 4

    with pytest.raises(OptionError, match=r"`SpeculationConfig` has no option `num_tre_nodes`\. Options of its own"):
        target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4)


def test_a_malformed_tree_is_refused_when_it_is_set() -> None:
    with pytest.raises(DraftTreeError, match="Node 1 must come after its parent, but its parent is 2"):
        SpeculationConfig(draft_tree={"parents": [-1, 2, 0], "ranks": [-1, 0, 0]})


def test_options_survive_saving_and_loading(tmp_path: Path) -> None:
    SpeculationConfig(draft_tree=TREE).save_pretrained(tmp_path)

    assert SpeculationConfig.from_pretrained(tmp_path).draft_tree == TREE


def test_options_travel_with_the_drafter(tmp_path: Path) -> None:
    drafter = make_drafter(make_target())
    drafter.generation_config = SpeculationConfig(draft_tree=TREE)
    drafter.save_pretrained(tmp_path)

    again = type(drafter).from_pretrained(tmp_path)

    assert again.generation_config.draft_tree == TREE
    assert again.draft_tree.to_json() == TREE


def test_a_tree_among_the_options_comes_before_that_of_the_config() -> None:
    drafter = make_drafter(make_target(), draft_tree=DraftTree.chain(5).to_json())
    assert len(drafter.draft_tree) == 6

    drafter.generation_config.draft_tree = TREE

    assert drafter.draft_tree.to_json() == TREE


@pytest.mark.parametrize(("name", "least"), [("num_tree_nodes", 2), ("tree_depth", 1), ("tree_top_k", 1)])
def test_trees_that_cannot_grow_are_refused(name: str, least: int) -> None:
    assert getattr(SpeculationConfig(**{name: least}), name) == least
    with pytest.raises(OptionError, match=f"`{name}` must be at least {least}, but it is {least - 1}."):
        SpeculationConfig(**{name: least - 1})
    with pytest.raises(OptionError, match=f"`{name}` must be at least {least}, but it is '8'."):
        SpeculationConfig(**{name: "8"})
