"""The drafter as a model: options without weights, saved and loaded, and the targets that it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel

from tests import runs
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from transformers_falcon_spec import LookaheadConfig, LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, OptionError

OPTIONS = {"window_size": 4, "ngram_len": 3, "num_guesses": 2, "pool_size": 50}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    drafter = LookaheadDrafter.from_target(make_target(), **OPTIONS)
    drafter.generation_config = SpeculationConfig(verifier="gumbel")
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_folder_holds_options_but_neither_weights_nor_code(saved: Path) -> None:
    files = {path.name: path.stat().st_size for path in saved.iterdir() if path.is_file()}

    assert {path.name for path in saved.iterdir()} == {*files}
    assert set(files) == {"config.json", "generation_config.json"}
    assert sum(files.values()) < 1000
    assert OPTIONS.items() <= json.loads((saved / "config.json").read_text(encoding="utf-8")).items()


@pytest.mark.parametrize("kind", [LookaheadDrafter, AutoModel])
@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16])
def test_what_is_saved_is_loaded(saved: Path, kind: Any, dtype: Any) -> None:
    drafter = kind.from_pretrained(saved, **({} if dtype is None else {"dtype": dtype}))

    assert isinstance(drafter, LookaheadDrafter)
    assert drafter.draft_settings == OPTIONS
    assert drafter.generation_config.verifier == "gumbel"
    assert drafter.device == torch.device("cpu")
    assert drafter.dtype == (dtype if isinstance(dtype, torch.dtype) else torch.float32)


def test_options_and_a_config_can_be_given_when_loading(saved: Path) -> None:
    changed = LookaheadDrafter.from_pretrained(saved, window_size=9)
    given = LookaheadDrafter.from_pretrained(saved, config=LookaheadConfig(ngram_len=7))

    assert (changed.config.window_size, changed.config.ngram_len) == (9, 3)
    assert given.config.ngram_len == 7


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_drafter(make_target()).save_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"must be one of .*lookahead_spec.*, but it is .falcon_spec"):
        LookaheadDrafter.from_pretrained(tmp_path)


def test_the_commands_load_each_kind_by_its_config(saved: Path, tmp_path: Path) -> None:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "falcon")

    assert type(load_drafter(str(saved), target)) is LookaheadDrafter
    assert type(load_drafter(str(tmp_path / "falcon"), target)).__name__ == "FalconSpecDrafter"
    with pytest.raises(CheckpointError, match=r"This is a language model .* cannot be converted: it drafts as it is"):
        load_drafter(str(tmp_path / "target"), target)


def test_sizes_and_special_ids_are_those_of_the_target() -> None:
    config = LookaheadConfig.from_target(make_target(), window_size=3)

    assert (config.vocab_size, config.eos_token_id, config.window_size) == (VOCAB_SIZE, 2, 3)
    assert AutoConfig.for_model("lookahead_spec").ngram_len == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 0}, "`window_size` must be at least 1, but it is 0"),
        ({"ngram_len": 1}, "`ngram_len` must be at least 2, but it is 1"),
        ({"num_guesses": 0}, "`num_guesses` must be at least 1, but it is 0"),
        ({"pool_size": -3}, "`pool_size` must be at least 1, but it is -3"),
        ({"window": 5}, "`LookaheadConfig` has no option `window`"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LookaheadDrafter.from_target(make_target(), **options)


def test_an_option_of_another_type_is_refused() -> None:
    with pytest.raises(StrictDataclassError, match="window_size"):
        LookaheadConfig(window_size="wide")


def test_a_static_tree_is_refused() -> None:
    target = make_target()
    drafter = LookaheadDrafter.from_target(target)
    drafter.generation_config = SpeculationConfig(draft_tree={"parents": [-1, 0], "ranks": [-1, 0]})

    with pytest.raises(
        OptionError, match="A `LookaheadDrafter` makes its trees itself, but `draft_tree` names a static one"
    ):
        runs.drafted(target, drafter)


def test_a_verifier_for_drawn_drafts_is_refused() -> None:
    target = make_target()
    drafter = LookaheadDrafter.from_target(target, **OPTIONS)
    drafter.generation_config = SpeculationConfig(verifier="traversal")

    with pytest.raises(
        OptionError, match="needs a draft that was drawn, with its distributions and without lookahead nodes"
    ):
        runs.drafted(target, drafter, do_sample=True)


def test_a_target_with_another_vocabulary_is_refused() -> None:
    drafter = LookaheadDrafter.from_target(make_target())

    with pytest.raises(DrafterMismatchError, match=f"vocabulary of size {VOCAB_SIZE}, but the target .* gives 50"):
        runs.drafted(make_target(vocab_size=50), drafter, make_prompt() % 40 + 3)


def test_a_target_of_another_shape_will_do() -> None:
    drafter = LookaheadDrafter.from_target(make_target(), **OPTIONS)
    target = make_target("gpt2", n_embd=32).double()

    runs.informed(target, drafter).assert_equal()
