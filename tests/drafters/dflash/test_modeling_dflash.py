"""A DFlash drafter: what it shares with the stock one, and the options and targets that it refuses."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.dflash.makers import from_stock, make_dflash_drafter
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_target
from transformers_falcon_spec import (
    DFlashConfig,
    DrafterMismatchError,
    DraftTree,
    DraftTreeError,
    OptionError,
)

DEEP = {"num_hidden_layers": 4}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "`block_size` must be at least 2, the root included, but it is 1"),
        ({"mask_token_id": 97}, r"`mask_token_id` must lie in 0..96, the target's vocabulary, but it is 97"),
        ({"mask_token_id": -1}, "`mask_token_id` must lie in 0..96"),
        (
            {"target_layer_ids": []},
            r"`target_layer_ids` must name layers of the target, counted from 0, but they are \[\]",
        ),
        ({"target_layer_ids": [-2]}, "`target_layer_ids` must name layers"),
        ({"layer_types": ["chunked_attention"]}, "`layer_types` must be of"),
        ({"causal_layer_types": ["chunked_attention"]}, "`causal_layer_types` must be of"),
        ({"selector_rank": 4}, "DFlash2 needs all of .* each at least 1, but they are .*0, 0, 4, 0"),
        ({**SECOND, "selector_top_k": 0}, "DFlash2 needs all of .* each at least 1"),
        ({**SECOND, "conv_group_size": 7}, "`conv_group_size` must divide `hidden_size`, but they are 7 and 6656"),
        ({**SECOND, "selector_top_k": 98}, "`selector_top_k` must be at most 97, the vocabulary, but it is 98"),
        ({"confidence_temperatures": {"greedy": [1.0], "sampled": [1.0]}}, "for each position of a block of 3"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DFlashConfig(**{"vocab_size": 97, "block_size": 4, **options})


def test_a_draft_tree_that_is_none_is_refused() -> None:
    with pytest.raises(DraftTreeError, match="parent"):
        DFlashConfig(draft_tree={"parents": [0, 5], "ranks": [-1, 0]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 90}, "a vocabulary of size 97, but the target .* gives 90"),
        ({"hidden_size": 32, "head_dim": 8}, "features of size 128, but the target .* gives 64"),
        ({"num_hidden_layers": 2}, r"layers \[0, 1\] of the target, so they must lie in 0..0, but one is above that"),
    ],
    ids=["vocabulary", "widths", "layers"],
)
def test_a_target_that_it_was_not_made_for_is_refused(changes: dict[str, Any], message: str) -> None:
    drafter = make_dflash_drafter(make_target(**DEEP))

    with pytest.raises(DrafterMismatchError, match=message):
        runs.drafted(make_target(**{**DEEP, **changes}), drafter)


@pytest.mark.parametrize(
    "options", [{"draft_tree": DraftTree.chain(4).to_json()}, {"tree_depth": 4}], ids=["static", "grown"]
)
def test_trees_deeper_than_a_block_are_refused(options: dict[str, Any]) -> None:
    target = make_target(**DEEP)

    with pytest.raises(OptionError, match=r"A block has 3 slots, .* must end at depth 3, but .* reaches depth 4"):
        runs.drafted(target, make_dflash_drafter(target, options))


def test_the_default_is_a_grown_tree_and_a_chain_where_it_must_be_static() -> None:
    drafter = make_dflash_drafter(make_target(**DEEP))

    assert (drafter.is_tree_dynamic, drafter.max_depth, drafter.num_nodes) == (True, 3, 16)
    assert drafter.draft_tree.parents.tolist() == [[-1, 0, 1, 2]]


@pytest.mark.parametrize(
    "options", [{"tree_top_k": 7}, {"draft_tree": {"parents": [-1, 0], "ranks": [-1, 6]}}], ids=["grown", "static"]
)
def test_trees_wider_than_what_a_selector_chooses_among_are_refused(options: dict[str, Any]) -> None:
    target = make_target(**DEEP)

    with pytest.raises(OptionError, match=r"among the 6 best tokens of a mask .* asks for 7. Take a narrower tree"):
        runs.drafted(target, make_dflash_drafter(target, options, **SECOND))


@torch.no_grad()
def test_fresh_convolutions_change_nothing_but_by_what_their_input_says() -> None:
    target = make_target(**DEEP)
    plain, second = (make_dflash_drafter(target, **options) for options in ({}, SECOND))
    missing = second.load_state_dict(plain.state_dict(), strict=False)
    for layer in second.layers:
        for part in (layer.attention_conv, layer.mlp_conv):
            part.kernel_projection.weight.zero_()
    block, features = torch.randn(1, 4, 64), torch.randn(1, 5, 128)

    found = second(block, features).last_hidden_state

    assert missing.missing_keys
    torch.testing.assert_close(found, plain(block, features).last_hidden_state)


def test_a_target_with_several_ends_of_text_is_taken() -> None:
    target = make_target(eos_token_id=[5, 6], **DEEP)

    drafter = make_dflash_drafter(target)
    stock = from_stock(peaked_dflash(target), target)

    assert [drafter.config.eos_token_id, stock.config.eos_token_id] == [[5, 6]] * 2
