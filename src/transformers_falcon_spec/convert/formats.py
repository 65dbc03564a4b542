"""The tables of all formats that are converted, and how a format is recognised.

Sources: Bestpay-inc/Falcon, `models/cnets.py`; SafeAILab/EAGLE, `eagle/model/cnets1.py` and `cnets.py`;
FasterDecoding/Medusa; z-lab/dflash, `dflash/model.py`, whose form SpecForge writes, too; vllm-project/speculators,
`models/eagle3`, `models/dflash` and `models/dspark`, and vLLM, which reads all three; deepseek-ai/DeepSpec,
`deepspec/modeling/dspark`; Transformers, `muse_glimmer_assistant`;
`modeling_dream.py` and `pipelines/a2d` of ZHZisZZ/dllm, `modeling.py` of Fast-dLLM v2, `model.py` of
HKUNLP/DiffuLLaMA. Code that comes with a checkpoint is never run.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import MuseGlimmerAssistantConfig

from ..drafters.dflash import SECOND_VERSION, DFlashDrafter
from ..drafters.diffuspec import DiffusionDrafter
from ..drafters.eagle import EagleDrafter
from ..drafters.falcon import FalconSpecDrafter
from ..drafters.medusa import MedusaDrafter
from ..drafters.parallel_eagle import ParallelEagleDrafter
from ..drafters.registry import drafter_classes
from ..errors import CheckpointError
from ..generation.head import head_width
from ..generation.model_parts import embedding_width
from . import rules
from .table import FACTOR, FLAG, SIZE, WHOLE, Format, Row, here, inside, one, only, seen_as, shortened, there

COMPARED = "which equals the target's"
# What speculators keeps of the target beside a drafter.
TRAINING_COPIES = dict.fromkeys(
    ("verifier_norm.weight", "verifier_lm_head.weight"), "which only the training of the source reads"
)

TARGET = (
    one("vocab_size", SIZE, default=None),
    one("bos_token_id", default=lambda _fields: None),  # and not what configs here have where none is given
    one("eos_token_id", default=lambda _fields: None),
    one("pad_token_id", default=lambda _fields: None),
)
NAMED = one("_name_or_path", default=None, here="target_name_or_path", unset="")
VERIFIED = inside(
    "verifier",
    one("name_or_path", default=None, here="target_name_or_path"),
    there(architectures=[]),
    is_needed=False,
)
LLAMA = (
    there(model_type="llama"),
    one("hidden_size", SIZE),
    one("intermediate_size", SIZE),
    one("num_attention_heads", SIZE),
    one("num_hidden_layers", SIZE),
    one("num_key_value_heads", SIZE, default=itemgetter("num_attention_heads")),
    one("hidden_act", default="silu"),
    one("max_position_embeddings", default=2048),
    one("rms_norm_eps", default=1e-6),
)
ROTARY = Row(rules.read_rotary, rules.write_rotary)
OWN_EMBEDDINGS = Row(rules.read_embeddings)


# Falcon. The published code runs its LSTM over the batch axis, so every token starts from a zero state. It cuts blocks
# from the first row on; this package ends them at the newest row.

FALCON = Format(
    "Falcon",
    FalconSpecDrafter,
    is_marked=lambda config, _names: "k_mask" in config,
    rows=(
        *LLAMA,
        ROTARY,
        *TARGET,
        NAMED,
        one("k_mask", SIZE, here="block_size"),
        one("qkv_bias", FLAG, default=False, here="attention_bias"),
        here(recurrence="token", block_position_embedding=False, num_recurrent_layers=2, recurrent_dropout=0.1),
        Row(rules.read_paper_tree),
        OWN_EMBEDDINGS,
        rules.fits(features=head_width, embeddings=embedding_width),
    ),
    names={"recurrence.": "lstm."},
    droppable={
        rules.EMBEDDINGS: COMPARED,
        **dict.fromkeys(("lstm.weight_hh_l0", "lstm.weight_hh_l1"), "which nothing reads, for no state comes in"),
    },
    optional=rules.falcon_biases,
)


# Eagle-1 and 2, whose weights are alike, as are those of HASS; and Eagle-3, as published or of speculators. Eagle-3.1
# adds a norm for each feature and feeds back the normed output.

ONE_LAYER = only({"num_hidden_layers": 1}, "an Eagle drafter has one decoder layer")
EAGLE = Format(
    "Eagle-1/2",
    EagleDrafter,
    is_marked=lambda _config, names: (
        {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names) and "norm.weight" not in names
    ),
    rows=(
        ONE_LAYER,
        *LLAMA,
        ROTARY,
        *TARGET,
        NAMED,
        one("qkv_bias", FLAG, default=False),
        one("bias", FLAG, default=True, here="fc_bias"),
        here(version=1),
        OWN_EMBEDDINGS,
        rules.fits(features=head_width, embeddings=embedding_width),
    ),
    names={"layer.": "layers.0."},
    droppable={rules.EMBEDDINGS: COMPARED},
)
EAGLE3_LAYER = (
    *LLAMA,
    *TARGET,
    one("head_dim", SIZE, default=None),
    one("attention_bias", FLAG, default=False),
)
OF_SPECULATORS = inside(
    "transformer_layer_config",
    only({"model_type": "llama"}),
    *EAGLE3_LAYER,
    Row(rules.read_rotary, lambda config: {"rope_parameters": config.rope_parameters}),
    Row(rules.read_one_window),
    view=rules.with_llama_defaults,
)
EAGLE3_REST = (
    only({"target_hidden_size": itemgetter("hidden_size")}, "embeddings of a width of their own are not converted"),
    one("draft_vocab_size", SIZE, default=None),
    one("norm_before_residual", FLAG, default=False),
    one("norm_before_fc", FLAG, default=False),
    one("fc_norm", FLAG, default=False),
    one("norm_output", FLAG, default=False),
    here(version=3),
    OWN_EMBEDDINGS,
    rules.fits(features=rules.hidden_width, embeddings=embedding_width),
    Row(rules.read_feature_layers, rules.write_feature_layers),
)
OF_EAGLE3: dict[str, Any] = {
    "droppable": {
        rules.EMBEDDINGS: COMPARED,
        **dict.fromkeys(("d2t", "t2d"), "which leads every token to itself"),
        **TRAINING_COPIES,
    },
    "optional": lambda _source: ("t2d",),
    "complete": rules.complete_vocabulary,
}
EAGLE3 = Format(
    "Eagle-3",
    EagleDrafter,
    is_marked=lambda config, names: (
        "draft_vocab_size" in config or any(name.startswith("midlayer.") for name in names)
    ),
    rows=(ONE_LAYER, *EAGLE3_LAYER, ROTARY, NAMED, *EAGLE3_REST, only({"parallel_drafting": False})),
    names={"layer.": "midlayer."},
    **OF_EAGLE3,
)
EAGLE3_SPECULATORS = Format(
    "Eagle-3 (speculators)",
    EagleDrafter,
    is_marked=lambda config, _names: config.get("speculators_model_type") == "eagle3",
    rows=(
        there(speculators_model_type="eagle3", speculators_version="0.9.0", embed_requires_grad=False),
        inside(
            "speculators_config",
            there(algorithm="eagle3", default_proposal_method="greedy"),
            VERIFIED,
            is_needed=False,
        ),
        inside("transformer_layer_config", ONE_LAYER),
        OF_SPECULATORS,
        *EAGLE3_REST,
    ),
    names={"layer.": "layers.0."},
    **OF_EAGLE3,
)


# P-EAGLE: Eagle-3 with masks, of speculators and in the form that vLLM reads, which has two names for the first layer.


def _parallel(name: str, first: str) -> Format:
    """The table of P-EAGLE in the form that vLLM reads, whose first layer is called `first`."""
    return Format(
        name,
        ParallelEagleDrafter,
        is_marked=lambda _config, names: "mask_hidden" in names and any(each.startswith(first) for each in names),
        rows=(*EAGLE3_LAYER, ROTARY, NAMED, *EAGLE3_REST, Row(rules.read_mask)),
        names={"layer.": first},
        **OF_EAGLE3,
    )


PEAGLE = _parallel("P-EAGLE", "midlayer.")
PEAGLE_NUMBERED = _parallel("P-EAGLE, its first layer numbered", "layers.0.")
PEAGLE_SPECULATORS = Format(
    "P-EAGLE (speculators)",
    ParallelEagleDrafter,
    is_marked=lambda config, _names: config.get("speculators_model_type") == "peagle",
    rows=(
        inside("speculators_config", VERIFIED, Row(rules.read_num_drafted)),
        OF_SPECULATORS,
        *EAGLE3_REST,
        Row(rules.read_mask),
    ),
    names={"layer.": "layers.0."},
    **OF_EAGLE3,
)


# Medusa heads: Medusa-1 has LM heads of its own, v2 uses the target's.

MEDUSA_HEADS = (
    *TARGET,
    one("base_model_name_or_path", default=None, here="target_name_or_path"),
    Row(rules.read_heads),
    only({"medusa_num_layers": itemgetter("num_layers")}, "so many blocks are in each head of its weights"),
    rules.fits(features=head_width),
)
MEDUSA_FIELDS = {"medusa_num_heads", "medusa_num_layers"}
MEDUSA = Format(
    "Medusa-1",
    MedusaDrafter,
    is_marked=lambda config, names: bool(MEDUSA_FIELDS & config.keys()) and rules.has_lm_heads(config, names),
    rows=(*MEDUSA_HEADS, Row(rules.read_scored_tokens), here(has_lm_heads=True)),
    names={"heads.": ""},
)
MEDUSA_V2 = Format(
    "Medusa v2 heads",
    MedusaDrafter,
    is_marked=lambda config, _names: bool(MEDUSA_FIELDS & config.keys()),
    rows=(*MEDUSA_HEADS, here(has_lm_heads=False)),
    names={"heads.": ""},
)


# DFlash and DFlash2, as published, and DFlash of speculators. Layers are those of Qwen3.

# Fields that public software knows, and the only values with which it computes what drafters here compute.
DFLASH_PLAIN = only(
    {
        "attention_bias": False,
        "add_swa_attention_sink_bias": False,
        "is_neox_style": True,
        "logit_scale": 1,
        "shift_label": False,
        "projector_type": "dflash",
        "target_hidden_size": itemgetter("hidden_size"),
        "draft_vocab_size": lambda fields: fields.get("vocab_size"),
    }
)
DFLASH_LAYERS = (
    only({"model_type": "qwen3"}),
    there(model_type="qwen3"),
    *TARGET,
    seen_as(
        rules.as_qwen3,
        one("hidden_size", SIZE),
        one("intermediate_size", SIZE),
        one("num_hidden_layers", SIZE),
        one("num_attention_heads", SIZE),
        one("num_key_value_heads", SIZE),
        one("head_dim", SIZE),
        one("max_position_embeddings", SIZE),
        one("rms_norm_eps"),
        one("hidden_act"),
        replace(one("rope_parameters"), write=rules.write_rotary),
        one("layer_types"),
        Row(rules.read_window, rules.write_window),
    ),
    DFLASH_PLAIN,
    rules.fits(features=head_width, embeddings=embedding_width),
    Row(rules.check_embedding_scale),
)
DFLASH_REST = (
    only({"sample_from_anchor": False}),
    one("block_size", WHOLE),
    one("mask_token_id", WHOLE),
    one("input_embedding_scale", FACTOR, default=None),
    one("output_multiplier", FACTOR, default=None),
    one("final_logit_softcapping", FACTOR, default=None, unset=0),
    Row(rules.read_published_causal, rules.write_published_causal),
    rules.layers_read("target_layer_ids", first=0),
)
DFLASH_NAMES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
DFLASH2 = Format(
    "DFlash2",
    DFlashDrafter,
    is_marked=lambda config, _names: "DFlash2DraftModel" in (config.get("architectures") or ()),
    rows=(
        seen_as(rules.with_dflash_config, *DFLASH_LAYERS, *DFLASH_REST, *(one(name, SIZE) for name in SECOND_VERSION)),
    ),
    names=DFLASH_NAMES,
)
DFLASH = Format(
    "DFlash",
    DFlashDrafter,
    is_marked=lambda config, _names: (
        "DFlashDraftModel" in (config.get("architectures") or ()) or "dflash_config" in config
    ),
    rows=(
        seen_as(
            rules.with_dflash_config,
            *DFLASH_LAYERS,
            *DFLASH_REST,
            only(dict.fromkeys(SECOND_VERSION), "DFlash2 has it, which `architectures` would name"),
            back=rules.into_dflash_config,
        ),
    ),
    names=DFLASH_NAMES,
)
DFLASH_COPIES = dict.fromkeys(rules.TARGETS_PARTS, COMPARED)
SPECULATORS_REST = (
    inside("speculators_config", VERIFIED, is_needed=False),
    inside("transformer_layer_config", *DFLASH_LAYERS),
    DFLASH_PLAIN,
    one("block_size", WHOLE),
    one("mask_token_id", WHOLE),
    Row(rules.read_speculators_causal),
    rules.layers_read("aux_hidden_state_layer_ids", first=1),  # hidden states, one more
)
DFLASH_SPECULATORS = Format(
    "DFlash (speculators)",
    DFlashDrafter,
    is_marked=lambda config, _names: config.get("speculators_model_type") == "dflash",
    rows=(*SPECULATORS_REST, one("sample_from_anchor", FLAG, default=False)),
    names=DFLASH_NAMES,
    droppable={**DFLASH_COPIES, **TRAINING_COPIES},
    complete=rules.check_copies,
)


# DSpark: DFlash with scores between neighbours, of DeepSpec and of speculators.

DSPARK_SCORES = (one("markov_rank", WHOLE), one("markov_head_type", default="vanilla"))
CONFIDENCE = dict.fromkeys(
    ("confidence_head.proj.weight", "confidence_head.proj.bias"), "for trees grow by the probabilities of tokens"
)
DSPARK = Format(
    "DSpark",
    DFlashDrafter,
    is_marked=lambda config, _names: "Qwen3DSparkModel" in (config.get("architectures") or ()),
    rows=(*DFLASH_LAYERS, *DFLASH_REST, *DSPARK_SCORES, here(sample_from_anchor=True)),
    names=DFLASH_NAMES,
    droppable={**DFLASH_COPIES, **CONFIDENCE},
    complete=rules.check_copies,
)
DSPARK_SPECULATORS = Format(
    "DSpark (speculators)",
    DFlashDrafter,
    is_marked=lambda config, _names: config.get("speculators_model_type") == "dspark",
    rows=(*SPECULATORS_REST, *DSPARK_SCORES, one("sample_from_anchor", FLAG, default=True)),
    names=DFLASH_NAMES,
    droppable={**DFLASH_COPIES, **CONFIDENCE, **TRAINING_COPIES},
    complete=rules.check_copies,
)


# DFlash of Transformers.

DFLASH_TRANSFORMERS = Format(
    "DFlash (Transformers)",
    DFlashDrafter,
    is_marked=lambda config, _names: config.get("model_type") == MuseGlimmerAssistantConfig.model_type,
    rows=(Row(rules.read_stock_dflash), rules.fits(features=head_width, embeddings=embedding_width)),
)


# Masked diffusion models. All were made of autoregressive models and keep their layers: with a mask of who sees whom a
# stock model of Transformers computes the same logits.

STACK = (
    *LLAMA,
    ROTARY,
    one("head_dim", SIZE, default=lambda fields: fields["hidden_size"] // fields["num_attention_heads"]),
    one("vocab_size", SIZE),
)
WRAPPED = {"model.": ""}


def _diffusion(name: str, family: rules.Family) -> Format:
    """The table of a family that its `model_type` tells from all others."""
    return Format(name, DiffusionDrafter, family.is_marked, STACK, WRAPPED, make=family.make)


DREAM = _diffusion("Dream", rules.Family({"Dream": "qwen2"}))
A2D = _diffusion(
    "A2D",
    rules.Family(
        {"a2d-llama": "llama", "a2d-qwen2": "qwen2", "a2d-qwen3": "qwen3"}, logits_shift=0, block_field="block_size"
    ),
)
FAST_DLLM = _diffusion(
    "Fast-dLLM v2", rules.Family({"Fast_dLLM_Qwen": "qwen2"}, block_field="bd_size", needs_block=True, mask=151665)
)
DIFFULLAMA = Format(
    "DiffuLLaMA",
    DiffusionDrafter,
    # A Llama with a mask, which no language model needs.
    is_marked=lambda config, _names: config.get("model_type") == "llama" and config.get("mask_token_id") is not None,
    rows=STACK,
    names=WRAPPED,
    make=rules.Family({"llama": "llama"}).make,
)


FORMATS = (  # the first that is marked counts
    DREAM,
    A2D,
    FAST_DLLM,
    EAGLE3_SPECULATORS,
    PEAGLE_SPECULATORS,
    DFLASH_SPECULATORS,
    DSPARK_SPECULATORS,
    DSPARK,
    FALCON,
    DFLASH_TRANSFORMERS,
    DFLASH2,
    DFLASH,
    MEDUSA,
    MEDUSA_V2,
    PEAGLE,
    PEAGLE_NUMBERED,
    EAGLE3,
    EAGLE,
    DIFFULLAMA,
)
SPECULATORS = ("eagle3", "peagle", "dflash", "dspark")  # types of speculators that are converted
# Formats that are recognised but cannot be converted, with the reason. What marks each: the values of fields of the
# config, fields that are neither missing, false, zero nor null, or the names of weights. The first that fits counts.
UNSUPPORTED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "unsupported.json").read_text("utf-8"))
LANGUAGE_MODEL = "a language model"
_NO_CODE = "The code that comes with it (`auto_map`) is never run. "


def detect(config: Mapping[str, Any], names: Collection[str]) -> Format:
    """Detect the format of a checkpoint from its `config.json` and the names of its weights, never from its own name.

    `config` has as `mask_token_id` the mask that a tokenizer beside it names, if it names none itself.

    Raises:
        [`CheckpointError`]: a known format that is not converted, with the reason; an unknown one, with the fields of
            its config and the names of its weights, and their shapes if `names` holds those.

    Example:

    ```python
    >>> detect({"k_mask": 2}, ["lstm.weight_ih_l0"]).name
    'Falcon'

    ```
    """
    refuse(config, names)
    for table in FORMATS:
        if table.is_marked(config, names):
            return table
    raise CheckpointError(
        f"The `model_type` {config.get('model_type')!r} is no drafter that is known here. Commands know one of your "
        "own by `--import MODULE`, Python once that module is imported. Checkpoints of other software must be of one "
        f"of the formats {[table.name for table in FORMATS]}, but neither config nor weights show which: the config "
        f"has the fields {sorted(config)} and `architectures` {config.get('architectures')}, the weights are called "
        f"{shortened(names)}. {_NO_CODE if 'auto_map' in config else ''}See `docs/convert.md`."
    )


def refuse(config: Mapping[str, Any], names: Collection[str] = ()) -> None:
    """Refuse what cannot be converted by its config and by such names of weights as are known: [`CheckpointError`]."""
    for unsupported, marks in UNSUPPORTED.items():
        evidence = _evidence(marks, config, names)
        if evidence is None:
            continue
        if unsupported != LANGUAGE_MODEL or not any(table.is_marked(config, names) for table in FORMATS):
            raise CheckpointError(
                f"This is {unsupported} ({evidence}), which cannot be converted: {marks['reason']} What can be is in "
                "`docs/convert.md`."
            )

    kind = config.get("speculators_model_type")
    if kind not in (None, *SPECULATORS):
        raise CheckpointError(
            f"`speculators_model_type` must be of {SPECULATORS} to be converted, but it is {kind!r}, which is "
            "not known here. See `docs/convert.md`."
        )
    if str(config.get("model_type")) in drafter_classes():
        raise CheckpointError(
            f"`SOURCE` must be a checkpoint of other software, but its `model_type` is {config['model_type']!r}: a "
            f"drafter of this package. Load it with `from_pretrained`."
        )


def _evidence(marks: Mapping[str, Any], config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """What shows that a checkpoint is of the format with these marks; None if nothing does."""
    for field, expected in marks.get("values", {}).items():
        value = config.get(field)
        if isinstance(value, list) and expected in value:
            return f"`{field}` names {expected!r}"
        if value == expected:
            return f"`{field}` is {expected!r}"

    for path in marks.get("fields", ()):
        place, _, field = path.rpartition(".")
        holder = config.get(place) if place else config
        if isinstance(holder, Mapping) and holder.get(field):
            return f"`{path}` is {str(holder[field])[:80]}"

    found = [name for name in names if re.match(marks.get("weights", "$"), name)]
    return f"there are weights called {shortened(found)}" if found else None
