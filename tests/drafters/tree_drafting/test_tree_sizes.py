"""How many nodes trees have that grow, where the options name no number and nothing is tuned: 16, and more where a GPU captures steps."""

from typing import Any

import pytest

from tests import runs
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.generation.loop import SpeculativeDecoding


def make_grown(target: Any, **options: Any) -> Any:
    """A Falcon drafter of blocks that have candidates for large trees; all of them grow."""
    drafter = make_drafter(target, block_size=4)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, tune=False, **options)
    return drafter


@pytest.fixture
def sizes_read(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The nodes of drafts that the target reads, those of the root alone left out."""
    sizes: set[int] = set()
    read = SpeculativeDecoding.read

    def noted(self: SpeculativeDecoding, draft: Any, *args: Any) -> Any:
        if draft.num_passes:
            sizes.add(draft.token_ids.shape[1])
        return read(self, draft, *args)

    monkeypatch.setattr(SpeculativeDecoding, "read", noted)
    return sizes


@pytest.mark.parametrize(("options", "num_nodes"), [({}, 16), ({"num_tree_nodes": 24}, 24)], ids=["default", "24"])
@pytest.mark.parametrize("capture", [False, True])
def test_trees_have_16_nodes_on_a_cpu(
    capture: bool, options: dict[str, Any], num_nodes: int, sizes_read: set[int]
) -> None:
    target = make_target().double()

    pair = runs.both(target, make_grown(target, capture=capture, **options))

    pair.assert_equal(is_kept=False)
    assert sizes_read == {num_nodes}


def test_a_default_is_saved_as_none_and_settings_are_those_of_a_cpu(tmp_path: Any) -> None:
    drafter = make_grown(make_target())
    drafter.save_pretrained(tmp_path)

    loaded = type(drafter).from_pretrained(tmp_path)

    assert loaded.generation_config.num_tree_nodes is None
    assert (loaded.num_tree_nodes, loaded.num_nodes) == (16, 16)
    assert loaded.draft_settings["num_tree_nodes"] == 16
