"""DFlash drafters of Transformers, converted: the same weights, the drafts of the stock loop, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from tests import runs
from tests.batches import batch_and_drafted
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_target
from transformers_falcon_spec import (
    CheckpointError,
    DFlashDrafter,
    DrafterMismatchError,
    DraftTree,
    OptionError,
    SpeculationConfig,
    load_drafter,
)
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.drafters.config_fields import update_config


@pytest.fixture(autouse=True)
def own_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def saved(folder: Path, **changes: Any) -> Path:
    """A stock drafter of a target of four layers and 97 tokens."""
    peaked_dflash(make_target(num_hidden_layers=4), target_layer_ids=[0, 2], **changes).save_pretrained(folder)
    return folder


def test_a_folder_of_the_stock_drafter_loads_with_its_weights_and_drafts_for_the_target(tmp_path: Path) -> None:
    target, folder = make_target(num_hidden_layers=4), saved(tmp_path / "stock")
    stock = peaked_dflash(target, target_layer_ids=[0, 2])

    drafter = load_drafter(folder, target)

    assert isinstance(drafter, DFlashDrafter)
    assert drafter.config.vocab_size == target.config.vocab_size
    assert (drafter.block_size, drafter.feature_layers) == (3, (1, 3))
    weights, theirs = drafter.state_dict(), stock.state_dict()
    assert weights.keys() == theirs.keys()
    assert all(weights[name].equal(theirs[name]) for name in weights)
    pair = runs.both(target, drafter)
    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 0


@pytest.mark.parametrize("mode", [{"do_sample": False}, runs.SAMPLING], ids=["greedy", "sampling"])
def test_the_text_is_the_targets_own_with_chains_trees_and_batches(mode: dict[str, Any], tmp_path: Path) -> None:
    target, tree = make_target(num_hidden_layers=4).double(), {"parents": [-1, 0, 0, 1], "ranks": [-1, 0, 2, 1]}
    drafter = load_drafter(saved(tmp_path / "stock"), target)

    for options in ({}, {"dynamic_tree": False}, {"draft_tree": tree}):
        drafter.generation_config = SpeculationConfig(**options)
        pair = runs.informed(target, drafter, **mode)
        pair.assert_equal()
        assert pair.stats.num_drafted > pair.stats.num_steps
    batch_and_drafted(target, drafter).assert_equal()


def test_a_converted_drafter_is_saved_and_loads_like_any_other(tmp_path: Path) -> None:
    target = make_target(num_hidden_layers=4)
    drafter: Any = load_drafter(saved(tmp_path / "stock"), target)

    drafter.save_pretrained(tmp_path / "own")
    again = DFlashDrafter.from_pretrained(tmp_path / "own").eval()

    assert again.config.to_diff_dict() == drafter.config.to_diff_dict() | {"architectures": ["DFlashDrafter"]}
    features, block = torch.randn(1, 5, 128), torch.randn(1, 4, 64)
    assert again(block, features).last_hidden_state.equal(drafter(block, features).last_hidden_state)


def test_a_tree_that_was_saved_into_the_stock_folder_is_drafted(tmp_path: Path) -> None:
    target, folder, tree = make_target(num_hidden_layers=4), saved(tmp_path / "stock"), DraftTree.chain(2).to_json()
    update_config(folder, draft_tree=tree)

    assert load_drafter(folder, target).draft_tree.to_json() == tree
    out = runs.drafted(target, AutoModel.from_pretrained(folder), speculation_type="dflash")  # the stock loop goes on
    assert out.sequences.equal(runs.plain(target).sequences)


def test_without_a_target_the_vocabulary_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="how large the vocabulary is, but the source does not say it"):
        convert_checkpoint(saved(tmp_path / "stock"), tmp_path / "own")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ({"hidden_size": 32}, DrafterMismatchError, "features of size 64, but the target"),
        ({"num_hidden_layers": 3}, DrafterMismatchError, r"layers \[0, 2\] of the target, so they must lie in 0..1"),
        ({"vocab_size": 50}, OptionError, "`mask_token_id` must lie in 0..49, the target's vocabulary, but it is 96"),
    ],
    ids=["widths", "layers", "mask"],
)
def test_a_target_that_it_was_not_made_for_is_refused(
    target: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "stock", mask_token_id=96)

    with pytest.raises(error, match=message):
        load_drafter(folder, make_target(**{"num_hidden_layers": 4, **target}))


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "stock")
    stock = peaked_dflash(make_target(num_hidden_layers=4), target_layer_ids=[0, 2])
    weights = stock.state_dict()
    del weights["encoder.fc.weight"]
    stock.save_pretrained(folder, state_dict=weights)

    with pytest.raises(CheckpointError, match=r"missing: \['encoder.fc.weight'\]"):
        load_drafter(folder, make_target(num_hidden_layers=4))
