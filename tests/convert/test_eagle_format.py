"""Eagle checkpoints, converted: the same numbers as the published forwards, and the target's own text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import EagleDrafter

from . import foreign, reference_eagle
from .drafting import View, chain, commits, converted, random_ids
from .refusals import refused

LENGTH = 90
DEPTH = 5
ENDS = (LENGTH - 4, LENGTH - 1, LENGTH)
FIRST: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama 3": {"bias": False, "rope_theta": 500000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen 2": {"qkv_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
}
MIDLAYER: dict[str, dict[str, Any]] = {
    "own vocabulary": {"eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS, "rope_theta": 500000.0},
    "whole vocabulary": {"eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS, "draft_vocab_size": VOCAB_SIZE},
    "llama 3.1": {
        "eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS,
        "rope_theta": 500.0,  # so that pairs are slowed down, kept, and in between
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "wide heads": {"eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS, "head_dim": 24},
    "normed residual": {
        "eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "attention_bias": True,
    },
    "3.1": {"eagle_aux_hidden_state_layer_ids": foreign.LAYER_IDS, "fc_norm": True, "norm_output": True},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "new rotary fields": {"layer_fields": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}},
    "normed residual": {"norm_before_residual": True, "layer_fields": {"attention_bias": True}},
    "normed features": {"norm_before_fc": True, "draft_vocab_size": VOCAB_SIZE},
    "3.1": {"fc_norm": True, "norm_output": True},
}
THIRD = [("midlayer", variant) for variant in MIDLAYER] + [("layers.0", variant) for variant in SPECULATORS]


def third(layer: str, variant: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Config, the sizes and switches that the reference reads, and weights of an Eagle-3 checkpoint."""
    if layer == "midlayer":
        config, weights = foreign.eagle3(**MIDLAYER[variant])
        return config, config, weights
    config, weights = foreign.eagle3_speculators(**SPECULATORS[variant])
    inner = config["transformer_layer_config"]
    return config, {**inner, **inner.get("rope_parameters", {}), **config}, weights


@pytest.mark.parametrize("variant", FIRST)
@torch.no_grad()
def test_the_first_forward_is_the_published_one(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.eagle(**FIRST[variant])
    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, weights))
    embeds, features = torch.randn(2, LENGTH, foreign.HIDDEN)

    found = drafter(embeds[None], features[None]).states[0, 0]

    expected = reference_eagle.first_forward(weights, config, embeds, features)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", FIRST)
@torch.no_grad()
def test_features_fed_back_are_those_of_the_first_reference(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.eagle(**FIRST[variant])
    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, weights))
    drafter.generation_config.tree_depth = DEPTH
    ids, features = random_ids(LENGTH), torch.randn(LENGTH - 1, foreign.HIDDEN)
    head = torch.randn(VOCAB_SIZE, foreign.HIDDEN)
    view = View(weights["embed_tokens.weight"], head, foreign.HIDDEN)
    expected, predicted = reference_eagle.drafted_first(
        weights, config, ids.tolist(), features, lambda rows: rows @ head.T, DEPTH
    )

    found = chain(drafter, view, commits(ids, features, ENDS), DEPTH)

    assert found == expected
    torch.testing.assert_close(torch.cat(view.read), predicted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("layer", "variant"), THIRD)
@torch.no_grad()
def test_the_third_forward_is_the_published_one(layer: str, variant: str, tmp_path: Path) -> None:
    config, sizes, weights = third(layer, variant)
    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, weights, "model.safetensors"))
    embeds, features = torch.randn(LENGTH, foreign.HIDDEN), torch.randn(LENGTH, 3 * foreign.HIDDEN)

    found = drafter(embeds[None], features[None])

    states = reference_eagle.fused(weights, sizes, features)
    states = reference_eagle.third_forward(weights, sizes, layer, embeds, states)
    torch.testing.assert_close(found.states[0, 0], states, atol=1e-5, rtol=1e-5)
    logits = reference_eagle.third_logits(weights, sizes, states)
    torch.testing.assert_close(found.logits, logits, atol=1e-5, rtol=1e-5)
    assert drafter.feature_layers == tuple(foreign.LAYER_IDS)  # in the order in which `fc` reads them


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, (2, 4, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            },
            (2, 4, 6),
        ),
    ],
    ids=["inputs of layers", "outputs of layers", "both"],
)
def test_the_config_names_inputs_of_layers_and_its_eagle_config_outputs(
    fields: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    make_target("llama", num_hidden_layers=7).save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.eagle3(**fields))

    drafter = converted(EagleDrafter, source, str(tmp_path / "target"))

    assert drafter.feature_layers == layers


def test_a_window_of_speculators_is_the_drafters(tmp_path: Path) -> None:
    window = {"layer_types": ["sliding_attention"], "sliding_window": 7}
    source = foreign.written(tmp_path / "source", *foreign.eagle3_speculators(layer_fields=window))

    assert converted(EagleDrafter, source).sliding_window == 7


@pytest.mark.parametrize("fields", [{}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}])
def test_a_list_without_layers_names_none(fields: dict[str, Any], tmp_path: Path) -> None:
    make_target("llama", num_hidden_layers=8).save_pretrained(tmp_path / "target")
    config = {"eagle_aux_hidden_state_layer_ids": [], **fields}
    source = foreign.written(tmp_path / "source", *foreign.eagle3(**config))

    assert converted(EagleDrafter, source, str(tmp_path / "target")).feature_layers == (2, 4, 5)


def test_outputs_of_layers_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    make_target("llama", num_hidden_layers=7).save_pretrained(tmp_path / "target")
    inner = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    source = foreign.written(tmp_path / "source", *foreign.eagle3(eagle_config=inner))

    message = r"must lie in 0\.\.5, the outputs of the target's layers but the last, but in .* it is \[1, 3, 6\]"
    refused(source, message, str(tmp_path / "target"))


@pytest.mark.parametrize(("layer", "variant"), THIRD)
@torch.no_grad()
def test_states_fed_back_are_those_of_the_third_reference(layer: str, variant: str, tmp_path: Path) -> None:
    config, sizes, weights = third(layer, variant)
    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, weights, "model.safetensors"))
    drafter.generation_config.tree_depth = DEPTH
    ids, features = random_ids(LENGTH), torch.randn(LENGTH - 1, 3 * foreign.HIDDEN)
    embeddings = torch.randn(VOCAB_SIZE, foreign.HIDDEN)
    read: list[torch.Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: read.append(output.flatten(0, -2)))
    expected, logits = reference_eagle.drafted_third(weights, sizes, layer, embeddings, ids.tolist(), features, DEPTH)
    view = View(embeddings, torch.zeros(VOCAB_SIZE, foreign.HIDDEN), 3 * foreign.HIDDEN)

    found = chain(drafter, view, commits(ids, features, ENDS), DEPTH)

    assert found == expected
    torch.testing.assert_close(torch.cat(read[-DEPTH:]), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [{"do_sample": False}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("form", ["eagle", "eagle3", "eagle3_speculators"])
def test_the_text_is_the_targets_own(form: str, mode: dict[str, Any], tmp_path: Path) -> None:
    target = make_target("llama").double()
    config, weights = getattr(foreign, form)()
    config["eagle_aux_hidden_state_layer_ids"] = foreign.LAYER_IDS
    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, weights)).double()

    pair = runs.informed(target, drafter, **mode)

    pair.assert_equal()
    assert pair.stats.num_drafted > 0
