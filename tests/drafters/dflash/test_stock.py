"""DFlash drafters for stock `generate`: what they are made like, that stock runs them losslessly, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, PreTrainedModel

from tests import runs
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import disable, enable
from transformers_falcon_spec.drafters.dflash import context_layers, make_dflash
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError, TargetError

DEEP = {"num_hidden_layers": 6}
SMALL = {"num_hidden_layers": 2, "block_size": 4}
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "cohere", "mistral", "phi3")


def peaked_dflash(target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A drafter whose guesses are spread over the vocabulary, in the target's type."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = make_dflash(target, **{**SMALL, **options})
    return drafter.to(target.dtype).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_generate_runs_it_and_writes_the_greedy_text(family: str) -> None:
    target = make_target(family, num_hidden_layers=4).double() if family == "llama" else make_target(family).double()
    layers = [0] if target.config.num_hidden_layers == 2 else [1]
    drafter, calls = peaked_dflash(target, target_layer_ids=layers), []
    drafter.register_forward_hook(lambda *_: calls.append(1))

    pair = [
        runs.plain(target, **options) for options in ({}, {"assistant_model": drafter, "speculation_type": "dflash"})
    ]

    assert pair[0].sequences.equal(pair[1].sequences)
    assert calls


def test_it_runs_without_this_package_in_the_path(tmp_path: Path) -> None:
    target = make_target(**DEEP).double()
    peaked_dflash(target).save_pretrained(tmp_path)
    gold = runs.plain(target).sequences

    disable()
    try:
        drafter = AutoModel.from_pretrained(tmp_path, dtype=torch.double)
        out = runs.plain(target, assistant_model=drafter, speculation_type="dflash")
    finally:
        enable()

    assert type(drafter).__module__.startswith("transformers.")
    assert out.sequences.equal(gold)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(2, [0]), (3, [1]), (4, [1]), (5, [1, 2]), (6, [1, 2, 3]), (12, [1, 3, 5, 7, 9]), (36, [1, 9, 17, 25, 33])],
)
def test_layers_are_read_from_the_second_to_the_third_last(num_layers: int, layers: list[int]) -> None:
    config = make_dflash(make_target(num_hidden_layers=num_layers), **SMALL).config

    assert config.target_layer_ids == layers
    assert config.layer_types == ["full_attention"] * 2
    assert (config.hidden_size, config.mask_token_id, config.block_size) == (64, 0, 4)


def test_layers_are_named_from_0_and_hidden_states_begin_with_the_embeddings() -> None:
    assert context_layers(peaked_dflash(make_target(**DEEP), target_layer_ids=[0, 2])) == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 3}, "`MuseGlimmerAssistantConfig` has no option `blocks`"),
        ({"block_size": 1}, "`block_size` must be at least 2"),
        ({"hidden_size": 32}, "`hidden_size` must be the target's, 64, but it is 32"),
        ({"mask_token_id": 97}, r"`mask_token_id` must lie in 0..96, but it is 97"),
        ({"target_layer_ids": [0, 5]}, r"`target_layer_ids` must name layers in 0..4, but they are \[0, 5\]"),
        ({"target_layer_ids": []}, "`target_layer_ids` must name layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "`layer_types` must be `full_attention` in every layer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_dflash(make_target(**DEEP), **options)


def test_a_target_of_several_widths_is_refused() -> None:
    with pytest.raises(DrafterMismatchError, match="embeddings, layers and head have one width"):
        make_dflash(make_target("opt", word_embed_proj_dim=32))


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_target_that_takes_no_positions_is_refused(family: str) -> None:
    with pytest.raises(DrafterMismatchError, match=r"needs a target that takes positions.*takes no `position_ids`"):
        make_dflash(make_target(family))


def test_a_target_that_keeps_a_state_is_refused() -> None:
    with pytest.raises(TargetError, match="`JambaForCausalLM` keeps a state of all that it read"):
        make_dflash(make_target("jamba"))


def test_a_target_whose_layers_differ_in_width_gives_the_largest() -> None:
    target = make_target("gemma3n", intermediate_size=[32, 96, 48, 64])

    assert make_dflash(target, **SMALL).config.intermediate_size == 96


def test_sampling_with_it_gives_tokens_that_the_target_may_write() -> None:
    target = make_target(**DEEP)
    options = {"assistant_model": peaked_dflash(target), "speculation_type": "dflash", "do_sample": True, "top_k": 5}

    out = runs.plain(target, make_prompt(), output_scores=True, **options)

    scores = torch.stack(out.scores, dim=1)[0]
    chosen = scores.gather(1, out.sequences[0, 12 : 12 + len(scores), None])
    assert (chosen > -torch.inf).all()
