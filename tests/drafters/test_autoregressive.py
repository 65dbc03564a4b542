"""Small language models made from a target: their depth, what they start from, and what is refused."""

from typing import Any

import pytest
import torch

from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.errors import OptionError

DEEP = {"num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("num_layers", "sources"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (4, [0, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5])]
)
def test_layers_are_spread_evenly_over_the_targets(num_layers: int, sources: list[int]) -> None:
    target = make_target(**DEEP)

    model = make_draft_model(target, num_hidden_layers=num_layers)

    theirs, ours = target.state_dict(), model.state_dict()
    for name, value in ours.items():
        _, has_layer, rest = name.partition("model.layers.")
        number, _, part = rest.partition(".")
        source = f"model.layers.{sources[int(number)]}.{part}" if has_layer else name
        assert value.equal(theirs[source])
    assert model.config.num_hidden_layers == num_layers


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "cohere", "granite"]
)
@torch.no_grad()
def test_with_all_layers_it_is_the_target(family: str) -> None:
    target = make_target(family)

    model = make_draft_model(target, num_hidden_layers=target.config.num_hidden_layers)

    assert type(model) is type(target)
    torch.testing.assert_close(model.eval()(make_prompt()).logits, target(make_prompt()).logits)


def test_without_options_it_has_two_layers_and_the_targets_special_tokens() -> None:
    target = make_target(**DEEP)
    target.generation_config.eos_token_id = [2, 7]

    model = make_draft_model(target.bfloat16())

    assert model.config.num_hidden_layers == 2
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [2, 7]
    assert target.config.num_hidden_layers == 6


def test_kinds_of_layers_are_those_of_the_chosen_ones() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    target = make_target("gemma3", num_hidden_layers=6, layer_types=kinds)

    model = make_draft_model(target, num_hidden_layers=3)

    assert model.config.layer_types == ["sliding_attention"] * 3  # of the first, the third and the last


def test_another_width_starts_afresh() -> None:
    model = make_draft_model(make_target(), hidden_size=32, num_attention_heads=2, num_key_value_heads=1)

    assert model.get_input_embeddings().weight.shape == (97, 32)
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 2}, "`LlamaConfig` has no option `layers`"),
        ({"num_hidden_layers": 0}, r"`num_hidden_layers` must lie in 1..6, the target's number, but it is 0"),
        ({"num_hidden_layers": 7}, r"`num_hidden_layers` must lie in 1..6, the target's number, but it is 7"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_draft_model(make_target(**DEEP), **options)
