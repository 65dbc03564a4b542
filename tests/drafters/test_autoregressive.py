"""Small language models made from a target: their depth, what they start from, and what is refused."""

from typing import Any

import pytest
import torch

from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError, TargetError
from transformers_falcon_spec.generation.model_parts import decoder_of

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


@pytest.mark.parametrize(
    ("family", "changes", "field", "expected"),
    [
        ("gemma3n", {"intermediate_size": [32, 48, 64, 96]}, "intermediate_size", [32, 64, 96]),
        (
            "deepseek_v32",
            {"num_hidden_layers": 4, "first_k_dense_replace": 2},
            "mlp_layer_types",
            [*["dense"], *["sparse"] * 2],
        ),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers", [1, 0, 1]),
        ("gemma4", {}, "layer_types", ["sliding_attention", "sliding_attention", "full_attention"]),
    ],
)
@torch.no_grad()
def test_what_is_said_of_each_layer_is_said_of_the_chosen_ones(
    family: str, changes: dict[str, Any], field: str, expected: list[Any]
) -> None:
    target = make_target(family, **changes)

    model = make_draft_model(target, num_hidden_layers=3).eval()  # of the first, the third and the last of four

    assert getattr(model.config, field) == expected
    assert model(make_prompt()).logits.isfinite().all()
    for index, layer in enumerate([0, 2, 3]):
        theirs, ours = (decoder_of(part).get_submodule("layers") for part in (target, model))
        assert all(value.equal(theirs[layer].state_dict()[name]) for name, value in ours[index].state_dict().items())


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_inputs_of_each_layer_are_those_of_the_chosen_ones(family: str) -> None:
    target = make_target(family)

    model = make_draft_model(target, num_hidden_layers=2)

    theirs, ours = (part.model.embed_tokens_per_layer.weight.unflatten(1, (-1, 8)) for part in (target, model))
    assert ours.equal(theirs[:, [0, 3]])
    theirs, ours = (part.model.per_layer_model_projection.weight.unflatten(0, (-1, 8)) for part in (target, model))
    assert ours.equal(theirs[[0, 3]])


# What Transformers says where no layer fills the cache that the last ones share, in its versions.
SHARED = "(set of layer types producing a cache|full_attention)"


@pytest.mark.parametrize(
    ("family", "options", "reason", "remedy"),
    [
        ("gemma3n_shared_kv", {}, SHARED, {"num_kv_shared_layers": 0}),
        ("gemma4_shared_kv", {}, SHARED, {"num_kv_shared_layers": 0}),
        ("lfm2", {"num_hidden_layers": 1}, "only be called on Attention layers", {"layer_types": ["full_attention"]}),
        (
            "gpt_neo",
            {},
            "attention_layers",
            {"attention_types": [[["global"], 2]], "attention_layers": ["global", "global"]},
        ),
    ],
)
@torch.no_grad()
def test_layers_that_make_no_model_are_refused_with_the_reason_and_a_remedy_that_works(
    family: str, options: dict[str, Any], reason: str, remedy: dict[str, Any]
) -> None:
    target = make_target(family)

    with pytest.raises(
        DrafterMismatchError, match=rf"Layers \[0.*\] of the target must make a .*{reason}.* starts afresh"
    ):
        make_draft_model(target, **options)

    model = make_draft_model(target, **{**options, **remedy}).eval()
    assert model(make_prompt()).logits.isfinite().all()


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_a_target_that_stock_assisted_generation_refuses_gets_no_draft_model(family: str) -> None:
    with pytest.raises(
        TargetError, match=r"needs a target whose cache can be cut back .* keeps a state of all that it read"
    ):
        make_draft_model(make_target(family))


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
