"""P-EAGLE checkpoints, converted: the numbers of the published forward in one pass, and the target's own text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import batch_and_drafted
from tests.families import VOCAB_SIZE
from tests.pairs import in_turn
from tests.tiny import make_target
from transformers_falcon_spec import ParallelEagleDrafter, SpeculationConfig
from transformers_falcon_spec.convert import detect, formats
from transformers_falcon_spec.errors import CheckpointError, OptionError

from . import foreign, reference_eagle
from .drafting import View, chain, commits, converted, random_ids
from .refusals import refused

LENGTH = 40
ENDS = (LENGTH - 4, LENGTH - 1, LENGTH)
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
VARIANTS: dict[str, tuple[str, Any, int]] = {  # the name of the first layer, parts, tokens of a block
    "speculators": ("layers.0", foreign.peagle_speculators(), foreign.NUM_DRAFTED),
    "speculators, a window": ("layers.0", foreign.peagle_speculators(SLIDING, fc_norm=True), foreign.NUM_DRAFTED),
    "vLLM": ("midlayer", foreign.peagle(), 8),
    "vLLM, numbered": ("layers.0", foreign.peagle("layers.0", norm_before_residual=True, attention_bias=False), 8),
}
TREE = {"parents": [-1, 0, 0, 1, 1, 2, 3], "ranks": [-1, 0, 1, 0, 2, 1, 0]}


def loaded(variant: str, folder: Path) -> Any:
    """The drafter of a folder of that form."""
    _first, parts, _num = VARIANTS[variant]
    return converted(ParallelEagleDrafter, foreign.written(folder / "source", *parts, "model.safetensors"))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_block_is_the_published_one(variant: str, tmp_path: Path) -> None:
    first, (config, weights), num_drafted = VARIANTS[variant]
    drafter = loaded(variant, tmp_path)
    sizes = {**config, **config.get("transformer_layer_config", {})}
    ids, features = random_ids(LENGTH), torch.randn(LENGTH - 1, 3 * foreign.HIDDEN)
    embeddings = weights.get("embed_tokens.weight", torch.randn(VOCAB_SIZE, foreign.HIDDEN))
    read: list[torch.Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: read.append(output.flatten(0, -2)))
    view = View(embeddings, torch.zeros(VOCAB_SIZE, foreign.HIDDEN), 3 * foreign.HIDDEN)

    found = chain(drafter, view, commits(ids, features, ENDS), num_drafted)

    expected = reference_eagle.parallel_logits(weights, sizes, first, embeddings, ids.tolist(), features, num_drafted)
    torch.testing.assert_close(read[-1], expected, atol=1e-5, rtol=1e-5)
    best = expected.argmax(dim=-1)
    assert found == (best + weights["d2t"][best]).tolist()
    assert drafter.feature_layers == tuple(foreign.LAYER_IDS)
    assert drafter.config.own_embeddings == ("embed_tokens.weight" in weights)


def test_the_form_is_told_by_config_and_weights() -> None:
    found = {variant: detect(*parts) for variant, (_first, parts, _num) in VARIANTS.items()}

    assert found == {
        "speculators": formats.PEAGLE_SPECULATORS,
        "speculators, a window": formats.PEAGLE_SPECULATORS,
        "vLLM": formats.PEAGLE,
        "vLLM, numbered": formats.PEAGLE_NUMBERED,
    }


@pytest.mark.parametrize(("variant", "mode"), in_turn(VARIANTS, ({"do_sample": False}, runs.SAMPLING)))
def test_the_text_is_the_targets_own_with_chains_and_trees(variant: str, mode: dict[str, Any], tmp_path: Path) -> None:
    target = make_target("llama").double()
    drafter = loaded(variant, tmp_path).double()

    runs.assert_texts_of_every_shape(target, drafter, TREE, **mode)


@pytest.mark.parametrize("variant", ["speculators, a window", "vLLM"])
def test_rows_of_a_batch_are_those_of_a_plain_one(variant: str, tmp_path: Path) -> None:
    pair = batch_and_drafted(make_target("llama").double(), loaded(variant, tmp_path).double())

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


def test_a_tree_deeper_than_a_block_is_refused(tmp_path: Path) -> None:
    drafter = loaded("speculators", tmp_path)
    drafter.generation_config = SpeculationConfig(tree_depth=foreign.NUM_DRAFTED + 1)

    with pytest.raises(OptionError, match="A block has 5 slots, one for each depth"):
        runs.drafted(make_target("llama"), drafter)


@pytest.mark.parametrize(
    ("parts", "message", "error"),
    [
        (foreign.peagle(ptd_token_id=None), "`pard_token` of the config .* must be a whole number", CheckpointError),
        (foreign.peagle(ptd_token_id=VOCAB_SIZE), "`mask_token_id` must lie in 0..96", OptionError),
        (foreign.peagle(num_hidden_layers=3), r"missing: \['layers.2.input_layernorm.weight'", CheckpointError),
        (
            foreign.peagle_speculators({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}),
            "must see the same part of the text",
            CheckpointError,
        ),
        (
            foreign.peagle_speculators({**SLIDING, "sliding_window": None}),
            "`sliding_window` of the config .* must be a positive whole number",
            CheckpointError,
        ),
        (
            foreign.eagle3(eagle_aux_hidden_state_layer_ids=foreign.LAYER_IDS, parallel_drafting=True),
            "`parallel_drafting` must be False .* says True",
            CheckpointError,
        ),
    ],
    ids=["no mask", "no such mask", "layers", "windows of some layers", "no window", "no feature of masks"],
)
def test_what_does_not_fit_is_refused(parts: Any, message: str, error: type[Exception], tmp_path: Path) -> None:
    refused(foreign.written(tmp_path / "source", *parts), message, error=error)
