"""The format of a checkpoint is detected from its config and the names of its weights alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import VOCAB_SIZE
from transformers_falcon_spec import MedusaDrafter
from transformers_falcon_spec.convert import Format, convert_checkpoint, detect, formats
from transformers_falcon_spec.convert.formats import refuse
from transformers_falcon_spec.convert.table import SIZE, Checkpoint, here, one, read_by_table, write_rows
from transformers_falcon_spec.errors import CheckpointError

from . import foreign, foreign_dflash

CONVERTED: dict[str, tuple[Any, Format]] = {
    "falcon": (foreign.falcon(), formats.FALCON),
    "eagle": (foreign.eagle(), formats.EAGLE),
    "eagle without bias": (foreign.eagle(bias=False), formats.EAGLE),
    "eagle3": (foreign.eagle3(), formats.EAGLE3),
    "eagle3 speculators": (foreign.eagle3_speculators(), formats.EAGLE3_SPECULATORS),
    "medusa": (foreign.medusa(), formats.MEDUSA),
    "medusa v2": (foreign.medusa(has_lm_heads=False), formats.MEDUSA_V2),
    "dflash of transformers": (({"model_type": "muse_glimmer_assistant"}, {}), formats.DFLASH_TRANSFORMERS),
    "dflash": (foreign_dflash.dflash(), formats.DFLASH),
    "dflash of another name": (foreign_dflash.dflash(architectures=["SomeDraftModel"]), formats.DFLASH),
    "dflash2": (foreign_dflash.dflash2(), formats.DFLASH2),
    "dflash speculators": (foreign_dflash.speculators(), formats.DFLASH_SPECULATORS),
    "dspark": (foreign_dflash.dspark(), formats.DSPARK),
    "dflash of dspark's makers": (foreign_dflash.dspark(rank=0), formats.DSPARK),
    "dspark speculators": (foreign_dflash.dspark_speculators(), formats.DSPARK_SPECULATORS),
}
BY_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "speculators' form of DFlash2": ({"speculators_model_type": "dflash2"}, "`speculators_model_type` is 'dflash2'"),
    "DSpark of Gemma 4": ({"architectures": ["Gemma4DSparkModel"]}, "its layers are those of Gemma 4"),
    "DeepSpec's Eagle-3": ({"architectures": ["Qwen3Eagle3Model"]}, "its form is not read here"),
    "Hydra": ({"hydra_num_heads": 4, "hydra_num_layers": 1}, "`hydra_num_heads` is 4"),
    "SpecBlock": ({"architectures": ["LlamaForCausalLMSpecBlock"], "draft_vocab_size": 9}, "rank heads"),
    "Domino": ({"gru_hidden_dim": 8}, "`gru_hidden_dim` is 8"),
    "speculators' form of Eagle-1": ({"speculators_model_type": "eagle"}, "`speculators_model_type` is 'eagle'"),
    "MTP": ({"speculators_model_type": "mtp"}, "`MtpDrafter.from_target(target)` drafts with it; stock"),
    "FastMTP": ({"speculators_model_type": "fast_mtp"}, "`MtpDrafter.from_target(target)` drafts with it; stock"),
    "a quantised checkpoint": ({"quantization_config": {"bits": 4}}, "Take the original"),
}
BY_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "Medusa-2": ({"medusa_num_heads": 3}, "medusa_head.0.0.linear.weight"),
    "Hydra": ({}, "hydra_mlp.0.weight"),
    "Domino": ({}, "prefix_gru.weight_ih_l0"),
    "SpecBlock": ({"draft_vocab_size": 9}, "rank_head.0.weight"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_format_is_detected_from_config_and_weights(name: str) -> None:
    (config, weights), expected = CONVERTED[name]

    assert detect(config, weights) is expected


def test_a_format_does_not_depend_on_names_of_folders_or_on_a_vocabulary_that_is_whole(tmp_path: Path) -> None:
    config, weights = foreign.eagle3(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    config["draft_vocab_size"] = config["vocab_size"]
    weights = {name: value for name, value in weights.items() if name not in ("d2t", "t2d")}
    weights["lm_head.weight"] = torch.randn(config["vocab_size"], foreign.HIDDEN)
    without = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    source = foreign.written(tmp_path / "medusa-of-falcon-by-eagle-1", without, weights)

    assert detect(config, weights) is formats.EAGLE3
    assert convert_checkpoint(source, tmp_path / "dest") is formats.EAGLE3


@pytest.mark.parametrize("name", BY_CONFIG)
def test_formats_that_are_known_but_not_converted_are_refused_by_name_before_weights_are_read(name: str) -> None:
    config, evidence = BY_CONFIG[name]

    with pytest.raises(CheckpointError, match="cannot be converted") as error:
        refuse({"model_type": "llama", **config})

    assert f"This is {name} (" in str(error.value)
    assert evidence in str(error.value)


@pytest.mark.parametrize("name", BY_KEYS)
def test_formats_that_only_their_weights_mark_are_refused_by_name(name: str) -> None:
    config, key = BY_KEYS[name]

    with pytest.raises(CheckpointError, match="cannot be converted") as error:
        detect(config, [key, "fc.weight", "layers.0.self_attn.q_proj.weight"])

    assert f"This is {name} (" in str(error.value)
    assert key in str(error.value)


def test_an_unknown_format_is_refused_with_what_was_seen() -> None:
    config = {"architectures": ["NewModel"], "new_field": 3}

    with pytest.raises(CheckpointError, match=r"fields \['architectures', 'new_field'\].*NewModel.*'body.weight'"):
        detect(config, ["body.weight"])
    with pytest.raises(
        CheckpointError,
        match=r"must be of \('eagle3', 'peagle', 'dflash', 'dspark'\) to be converted, but .* 'brand_new'",
    ):
        detect({"speculators_model_type": "brand_new"}, ["fc.weight"])


@pytest.mark.parametrize("kind", ["falcon_spec", "eagle_spec", "medusa_spec", "lookahead_spec"])
def test_a_drafter_of_this_package_needs_no_conversion(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{kind}': a drafter of this package. Load it"):
        refuse({"model_type": kind})


def test_a_new_format_is_one_table_which_is_read_and_written() -> None:
    weights = {f"blocks.{name}": value for name, value in foreign.medusa()[1].items()}
    config = {"tokens": VOCAB_SIZE, "width": foreign.HIDDEN, "predictors": 3}
    table = Format(
        "Predictors",
        MedusaDrafter,
        is_marked=lambda config, _names: "predictors" in config,
        rows=(
            one("tokens", SIZE, here="vocab_size"),
            one("width", SIZE, here="hidden_size"),
            one("predictors", SIZE, here="num_heads"),
            here(num_layers=1, has_lm_heads=True),
        ),
        names={"heads.": "blocks."},
    )

    drafter, _, _ = read_by_table(table, Checkpoint("someone/predictors", config, weights, {}, Path()))

    found = drafter.state_dict()
    assert {table.name_there(name) for name in found} == weights.keys()
    assert all(value.equal(weights[table.name_there(name)]) for name, value in found.items())
    assert write_rows(table.rows, drafter.config) == config
