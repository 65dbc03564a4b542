"""What the tables of `formats.py` say by functions: fields that follow from several others, and checks.

A rule of a row takes the checkpoint and the fields of the rows above, and returns fields of the drafter's config.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from ..drafters.config_fields import own_fields
from ..drafters.dflash import LAYER_TYPES, SECOND_VERSION, DFlashConfig
from ..drafters.diffuspec import DiffusionDrafter
from ..drafters.eagle import MIN_LAYERS_AS_PUBLISHED, EagleConfig, eagle3_feature_layers
from ..drafters.falcon import paper_tree
from ..drafters.whole_model import tokenizer_of
from ..errors import CheckpointError, DrafterMismatchError
from ..generation.model_parts import named
from .table import FLAG, SIZE, WHOLE, Checkpoint, Fields, Row, check_size, needs_target, shortened
from .vocabulary import read_vocabulary

logger = logging.getLogger(__name__)


def picked(fields: Mapping[str, Any], names: Iterable[str]) -> Fields:
    """The fields of these names, as far as they are there."""
    return {name: fields[name] for name in names if name in fields}


# The target: how wide it is, how deep, and weights of which a checkpoint may bring copies.

EMBEDDINGS = "embed_tokens.weight"
TARGETS_PARTS = {EMBEDDINGS: "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}


def fits(**widths: Callable[[PreTrainedModel], int]) -> Row:
    """Check that what is read of the target is as wide as the drafter; `widths` by what messages call them."""

    def check(source: Checkpoint, fields: Fields) -> None:
        for what, width in widths.items():
            if source.target is not None:
                check_size(what, fields["hidden_size"], width(source.target), source.target)

    return Row(check)


def hidden_width(target: PreTrainedModel) -> int:
    """How wide the target's hidden states are."""
    return int(target.config.get_text_config(decoder=True).hidden_size)


def depth_of(target: PreTrainedModel) -> int:
    """How many layers the target has."""
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def is_targets_own(source: Checkpoint, name: str) -> bool | None:
    """Whether embeddings or a head are the target's, but for rounding; None where there is nothing to compare with."""
    one = source.tensors[name]
    other = None if source.target is None else _weight_of(source.target, TARGETS_PARTS[name])
    if other is None:
        return None
    if one.shape != other.shape:
        return False

    coarsest = max(torch.finfo(each.dtype).eps for each in (one, other))
    is_rounded = coarsest > torch.finfo(torch.float32).eps
    smallest = 1e-6 if is_rounded else 0.0  # below it float16 rounds to few values
    return torch.allclose(one.float(), other.to("cpu", torch.float32), rtol=coarsest, atol=smallest)


def _weight_of(target: PreTrainedModel, part: str) -> Tensor | None:
    """The weight of a part of the target, from its files where it is not loaded; None where it lies nowhere here.

    `part` is the method of the target that gives the module.
    """
    weight: Any = getattr(getattr(target, part)(), "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():  # quantised, so without values to compare
        return None
    if not weight.is_meta:
        return weight.detach()

    ends = set()  # of names of files, which may begin in another way
    for name, each in target.named_parameters(remove_duplicate=False):
        if each is weight:
            ends.add(tuple(name.split(".")[-2:]))

    for path in _weight_files(target.config._name_or_path):
        try:
            with safe_open(path, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118  it is no dictionary
                    if tuple(key.split(".")[-2:]) in ends:
                        return stored.get_tensor(key)
        except (SafetensorError, OSError):  # of the target alone, which loading it says better
            continue
    return None


def _weight_files(name: str) -> list[Path]:
    """The safetensors files of a model in a folder, or of what the Hub's cache holds of it; nothing is fetched."""
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (OSError, HFValidationError):
            return []
    return sorted(folder.glob("*.safetensors"))


def read_embeddings(source: Checkpoint, _fields: Fields) -> Fields:
    """Whether the drafter must keep the embeddings that the checkpoint brings: they are not known as the target's."""
    is_trained = source.value("embed_requires_grad", FLAG, default=False)
    if EMBEDDINGS not in source.tensors:
        return {"own_embeddings": is_trained}

    is_copy = is_targets_own(source, EMBEDDINGS)
    if not is_copy:
        unknown = "there are no weights of a target to compare them with"
        why = unknown if is_copy is None else "they differ from the target's"
        logger.info("The drafter keeps the embeddings of `%s`: %s.", source.name, why)
    return {"own_embeddings": is_trained or not is_copy}


# Rotary positions.

DEFAULT_THETA = 10000.0
# Scalings that all software reads alike; in the published Eagle code `linear` and `dynamic` forget `rope_theta`.
SCALINGS = ("default", "llama3")


def read_rotary(source: Checkpoint, _fields: Fields) -> Fields:
    """Rotary parameters in a config of any version of Transformers, in the form of version 5."""
    scaling = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    is_object = isinstance(scaling, dict)
    theta = (scaling if is_object else {}).get("rope_theta", source.config.get("rope_theta", DEFAULT_THETA))
    if not is_object or type(theta) not in (int, float) or not 0 < theta < float("inf"):
        raise CheckpointError(
            "Rotary positions must be described by an object and a `rope_theta` above 0, but the config of "
            f"`{source.name}` says {scaling!r} with {theta!r}. Fetch the `config.json` of the drafter itself."
        )

    kind = scaling.get("rope_type", scaling.get("type", "default"))
    is_plain_linear = kind == "linear" and theta == DEFAULT_THETA
    if kind not in SCALINGS and not is_plain_linear:
        raise CheckpointError(
            f"Rotary positions must be of a kind in {SCALINGS}, or 'linear' with a `rope_theta` of "
            f"{DEFAULT_THETA:.0f}, but the config of `{source.name}` says {scaling} with {theta}. Other kinds are not "
            "converted: software reads them in different ways."
        )

    part = scaling.get("partial_rotary_factor", source.config.get("partial_rotary_factor"))
    is_nested = any(isinstance(value, dict) for value in scaling.values())  # by types of layers
    if is_nested or part not in (None, 1):
        raise CheckpointError(
            f"Rotary positions must turn whole heads, those of all layers alike, but the config of `{source.name}` "
            f"says {scaling if is_nested else f'`partial_rotary_factor` {part}'}. Public software reads that in "
            "different ways."
        )

    rope = {**scaling, "rope_type": kind, "rope_theta": float(theta)}
    rope.pop("type", None)
    return {"rope_parameters": rope}


def write_rotary(config: Any) -> Fields:
    """Rotary parameters in the form that every version of Transformers reads into a `LlamaConfig`."""
    scaling = dict(config.rope_parameters)
    theta = scaling.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


# Falcon.


def read_paper_tree(_source: Checkpoint, fields: Fields) -> Fields:
    """The paper's tree for blocks of this size, as the checkpoint holds none."""
    return {"draft_tree": paper_tree(fields["block_size"]).to_json()}


def falcon_biases(source: Checkpoint) -> tuple[str, ...]:
    """Biases that are zero: attention has them on queries, keys and values alone, the LSTM where `bias` says so."""
    has_bias = source.value("bias", FLAG, default=True)
    return ("self_attn.o_proj.bias",) if has_bias else ("self_attn.o_proj.bias", "recurrence.bias")


# Eagle.

SLIDING = LAYER_TYPES[1]
NUM_LAYERS_READ = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
INNER_CONFIG = "eagle_config"  # there SGLang and SpecForge count layers from 0 and read their outputs: one less


def with_llama_defaults(source: Checkpoint) -> Fields:
    """A layer's config as `LlamaConfig` reads it; special tokens, and what follows from other fields, stay open."""
    derived = ("rope_parameters", "head_dim", "num_key_value_heads")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {**LlamaConfig().to_dict(), **dict.fromkeys((*derived, *tokens)), **source.config}


def read_feature_layers(source: Checkpoint, _fields: Fields) -> Fields:
    """The hidden states that an Eagle-3 drafter reads: those in its config, else those of the published rule.

    vLLM (`gpu_model_runner.py`) reads the input of the layer that the config itself names, so hidden state i for id i.
    SGLang (`models/llama.py`) reads the output of the one that `eagle_config` names, so hidden state i + 1, as
    SpecForge trains.
    """
    ids = source.config.get(LAYER_IDS)
    inner = source.config.get(INNER_CONFIG)
    offset = 0
    if not ids and isinstance(inner, dict):
        ids = inner.get(LAYER_IDS)
        offset = 1

    num_layers = None if source.target is None else depth_of(source.target)
    if ids in (None, []):  # of which ModelOpt writes the second
        return {"feature_layers": _published_layers(source, num_layers)}

    is_list = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
    if not is_list or len(ids) != NUM_LAYERS_READ or len(set(ids)) != NUM_LAYERS_READ:
        raise CheckpointError(
            f"`{LAYER_IDS}` must list {NUM_LAYERS_READ} different hidden states, counted from 0, but in "
            f"`{source.name}` it is {ids!r}."
        )
    if num_layers is not None and max(ids) + offset >= num_layers:
        what = "outputs of the target's layers but the last" if offset else "inputs of the target's layers"
        raise CheckpointError(
            f"`{LAYER_IDS}` must lie in 0..{num_layers - 1 - offset}, the {what}, but in `{source.name}` it is {ids}."
        )
    return {"feature_layers": tuple(each + offset for each in ids)}


def _published_layers(source: Checkpoint, num_layers: int | None) -> tuple[int, ...]:
    """The layers that follow from the depth of the target."""
    if num_layers is None:
        raise needs_target("how many layers the target has, for from them follows which ones the drafter reads")
    if num_layers < MIN_LAYERS_AS_PUBLISHED:
        raise CheckpointError(
            f"`{source.name}` must say which layers it reads (`{LAYER_IDS}`), for the published rule needs a target "
            f"of at least {MIN_LAYERS_AS_PUBLISHED} layers, and the target has {num_layers}."
        )
    return eagle3_feature_layers(num_layers)


def write_feature_layers(config: EagleConfig) -> Fields:
    """The hidden states as vLLM and speculators count them."""
    return {LAYER_IDS: list(config.feature_layers)}


def read_one_window(source: Checkpoint, _fields: Fields) -> Fields:
    """The window of the text, which all layers have alike. It counts the token itself, as that of a drafter does."""
    types = set(source.config.get("layer_types") or ())
    if SLIDING not in types:
        return {}
    if types != {SLIDING}:
        raise CheckpointError(
            f"The layers of an Eagle drafter must see the same part of the text, but `layer_types` of `{source.name}` "
            f"are {source.config['layer_types']}."
        )
    return {"sliding_window": source.value("sliding_window", SIZE)}


_MASKS = ("pard_token", "ptd_token_id", "mask_token_id")  # the last one may come from a tokenizer


def read_mask(source: Checkpoint, _fields: Fields) -> Fields:
    """The token whose embedding the masks of P-EAGLE hold, which software calls by several names."""
    given = [name for name in _MASKS if source.config.get(name) is not None]
    return {"mask_token_id": source.value((given or _MASKS)[0], WHOLE)}


def read_num_drafted(source: Checkpoint, _fields: Fields) -> Fields:
    """The tokens that a drafter of speculators was trained to draft in one pass."""
    proposals = source.config.get("proposal_methods") or [{}]
    return {"block_size": replace(source, config=proposals[0]).value("speculative_tokens", SIZE)}


def complete_vocabulary(source: Checkpoint, config: EagleConfig) -> dict[str, Tensor]:
    """Check which tokens can be drafted: `d2t` holds offsets from draft to target ids, and `t2d` marks target ids."""
    is_whole = not config.has_own_vocabulary
    offsets = source.tensors.get("d2t", torch.zeros(config.num_draftable_tokens, dtype=torch.long))
    ids = offsets + torch.arange(len(offsets))
    can_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    if bool(((ids >= 0) & (ids < config.vocab_size)).all()):
        can_draft[ids] = True

    marks = source.tensors.get("t2d", can_draft).bool()
    is_wrong = can_draft.sum() != len(ids) or not can_draft.equal(marks)
    if is_wrong or (is_whole and offsets.any()):
        raise CheckpointError(
            f"`d2t` must lead to different tokens of the target's {config.vocab_size}, those that `t2d` marks, and "
            f"where it has all of them every one to itself, but in `{source.name}` it does not. An offset is added to "
            "the drafter's id: target = draft + d2t[draft]. Check `draft_vocab_size` of its config."
        )
    return {} if is_whole else {"d2t": offsets.long(), "t2d": can_draft}


# Medusa.

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_LM_HEAD = re.compile(r"\d+\.\d+\.weight")  # the last layer of a head that has one


def has_lm_heads(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether Medusa heads have LM heads of their own."""
    return str(config.get("version")) != "2" and any(_LM_HEAD.fullmatch(name) for name in names)


def read_heads(source: Checkpoint, _fields: Fields) -> Fields:
    """How many heads there are, of how many blocks and how wide: by the weights, for published configs name fewer."""
    num_heads = num_layers = hidden_size = 0
    for name, weight in source.tensors.items():
        found = _BLOCK.fullmatch(name)
        if found is not None:
            num_heads = max(num_heads, 1 + int(found[1]))
            num_layers = max(num_layers, 1 + int(found[2]))
            hidden_size = weight.shape[-1]

    if not num_heads:
        raise CheckpointError(
            f"Medusa heads must have weights called `0.0.linear.weight` and so on, but those of `{source.name}` "
            f"are called {shortened(source.tensors)}."
        )
    return {"num_heads": num_heads, "num_layers": num_layers, "hidden_size": hidden_size}


def read_scored_tokens(source: Checkpoint, fields: Fields) -> Fields:
    """How many tokens the first LM head scores."""
    head = source.tensors.get(f"0.{fields['num_layers']}.weight")
    return {} if head is None else {"vocab_size": len(head)}


# DFlash.

_PLAIN_INNER = {"attention_mode": ("gqa", "mha"), "projector_type": ("dflash",), "use_aux_hidden_state": (True,)}
_READ_INNER = (
    *("block_size", "mask_token_id", "target_layer_ids", "causal", "causal_head", "input_embedding_scale"),
    *("output_multiplier", "final_logit_softcapping", *SECOND_VERSION),
)


def with_dflash_config(source: Checkpoint) -> Fields:
    """A published config with what its `dflash_config` says, in which newer ones keep more of their fields."""
    inner = source.config.get("dflash_config")
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"The config of `{source.name}` must say in `dflash_config` which mask and which layers the drafter "
            f"reads, but there it has {inner!r}. Fetch the `config.json` of the drafter itself."
        )

    fields = dict(source.config)
    for name, value in inner.items():
        if name not in _READ_INNER and value not in (None, False, *_PLAIN_INNER.get(name, ())):
            raise CheckpointError(
                f"`dflash_config` must hold fields of {_READ_INNER} alone, but that of `{source.name}` says "
                f"`{name}` {value!r}, which may change what the drafter computes."
            )
        if value is not None:
            fields[name] = value

    return fields


def into_dflash_config(fields: Fields) -> Fields:
    """The reverse: what engines read in `dflash_config` alone goes there."""
    rest: Fields = {}
    inner: Fields = {}
    for name, value in fields.items():
        place = inner if name in _READ_INNER and name != "block_size" else rest
        place[name] = value

    return {**rest, "dflash_config": inner}


def as_qwen3(source: Checkpoint) -> Fields:
    """The config of the layers as the published class reads it, with all of its defaults."""
    given = {**picked(source.config, own_fields(Qwen3Config)), **read_rotary(source, {})}
    return Qwen3Config(**given).to_dict()


def read_window(source: Checkpoint, fields: Fields) -> Fields:
    """How far sliding layers look back. A window of public software counts the token itself, one here does not."""
    types = fields["layer_types"]
    if not set(types) <= set(LAYER_TYPES):
        raise CheckpointError(f"`layer_types` must be of {LAYER_TYPES}, but in `{source.name}` they are {types}.")
    if SLIDING not in types:
        return {}

    if source.config["sliding_window"] is None:
        raise CheckpointError(
            f"Layers of the type {SLIDING!r} need `use_sliding_window` and a `sliding_window` of at least 1, but the "
            f"config of `{source.name}` does not give both."
        )
    return {"sliding_window": source.value("sliding_window", SIZE) - 1}


def write_window(config: DFlashConfig) -> Fields:
    """The same, as public software counts."""
    is_sliding = SLIDING in (config.layer_types or ())
    return {"use_sliding_window": is_sliding, "sliding_window": config.sliding_window + 1 if is_sliding else None}


def read_published_causal(source: Checkpoint, fields: Fields) -> Fields:
    """Layers in which a token of a block sees no later one: the sliding ones, or as the config says, all or none.

    JetSpec's `causal_head` says the same of all layers; its code has no windows.
    """
    if source.config.get("causal_head") is not None and SLIDING in fields["layer_types"]:
        raise CheckpointError(
            f"A drafter of JetSpec (`causal_head`) must have layers of the type {LAYER_TYPES[0]!r} alone, for its own "
            f"code computes no windows, but those of `{source.name}` are {fields['layer_types']}."
        )
    names = [name for name in ("is_causal", "causal", "causal_head") if source.config.get(name) is not None]
    is_causal = source.value(names[0] if names else "causal", FLAG, default=None)
    types = (SLIDING,) if is_causal is None else LAYER_TYPES * is_causal
    return {"causal_layer_types": [each for each in types if each in fields["layer_types"]] or None}


def write_published_causal(config: DFlashConfig) -> Fields:
    """`is_causal`, unless the types of layers say as much."""
    types = {SLIDING} & set(config.layer_types or ())
    causal = set(config.causal_layer_types or ())
    return {} if causal == types else {"is_causal": bool(causal)}


def read_speculators_causal(source: Checkpoint, fields: Fields) -> Fields:
    """The same, where the config speaks of sliding layers alone."""
    is_free = source.value("sliding_window_non_causal", FLAG, default=False)
    return {"causal_layer_types": None if is_free or SLIDING not in fields["layer_types"] else [SLIDING]}


def layers_read(name: str, first: int) -> Row:
    """The layers of the target whose outputs are read; the foreign config calls its first layer `first`."""
    return Row(
        lambda source, _fields: {"target_layer_ids": _layer_ids(source, name, first)},
        lambda config: {name: [each + first for each in config.target_layer_ids]},
    )


def _layer_ids(source: Checkpoint, name: str, first: int) -> list[int]:
    """The layers, counted from 0. The target's last one is not read, for a norm stands behind it."""
    ids = source.config.get(name)
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < first for each in ids):
        raise CheckpointError(
            f"`{name}` must list what is read of the target's layers, whole numbers of at least {first}, but in "
            f"`{source.name}` it is {ids!r}."
        )

    layers = [each - first for each in ids]
    stated = source.config.get("num_target_layers")
    num_layers = stated if source.target is None else depth_of(source.target)
    if type(num_layers) is int and max(layers) > num_layers - 2:
        raise DrafterMismatchError(
            f"`{source.name}` reads the outputs of the target's layers {layers}, so they must lie in "
            f"0..{num_layers - 2}, but one is above that. Take the target that it was trained for."
        )
    return layers


def check_embedding_scale(source: Checkpoint, _fields: Fields) -> None:
    """Refuse a target that scales its embeddings where they are read."""
    if source.target is None:
        return
    scale = getattr(source.target.get_input_embeddings(), "scalar_embed_scale", 1)
    if scale != 1:
        raise DrafterMismatchError(
            "Published DFlash drafters need a target that reads its embeddings as they are stored, but "
            f"{named(source.target)} multiplies them by {scale:g} first, and public software does not agree whether "
            "its drafters read them so. Train one: `falcon-spec train --method dflash`."
        )


def read_stock_dflash(source: Checkpoint, _fields: Fields) -> Fields:
    """All fields of the drafter that Transformers has, a tree and temperatures that commands saved there included."""
    if source.target is None:
        raise needs_target("how large the vocabulary is")
    return {"hidden_size": DFlashConfig.hidden_size, **picked(source.config, own_fields(DFlashConfig))}


def check_copies(source: Checkpoint, _config: DFlashConfig) -> dict[str, Tensor]:
    """Refuse embeddings and a head of the drafter's own, for which there is no place."""
    for name in TARGETS_PARTS:
        is_copy = is_targets_own(source, name) if name in source.tensors else True
        if is_copy is None:
            raise needs_target(f"whether `{name}` equals that of the target, whose weights must lie here")
        if not is_copy:
            raise CheckpointError(
                f"A DFlash drafter must read the embeddings and the head of its target to be converted, but `{name}` "
                f"of `{source.name}` differs from the target's. Name the target that it was trained for; if it is "
                "that one, the drafter has weights of its own, for which drafters here have no place."
            )
    return {}


# Diffusion models.

# Fields that only describe windows, which the models' own code does not obey: all of their layers see the whole text.
_WINDOWS = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


@dataclass(frozen=True)
class Family:
    """What differs between diffusion models of several makers.

    Args:
        stock (`Mapping[str, str]`): By its `model_type` that of the class of Transformers with the same layers.
        logits_shift (`int`): As [`DiffusionConfig`] has it.
        block_field (`str`, *optional*): The field with the size of blocks that see themselves and earlier ones.
        needs_block (`bool`): Whether that must be given; otherwise all tokens see all where it is not.
        mask (`int`, *optional*): The mask where neither config nor tokenizer names it.
    """

    stock: Mapping[str, str]
    logits_shift: int = 1
    block_field: str = ""
    needs_block: bool = False
    mask: int | None = None

    def is_marked(self, config: Mapping[str, Any], _names: Collection[str]) -> bool:
        """Whether a config is of this family."""
        return config.get("model_type") in self.stock

    def make(self, source: Checkpoint, fields: Fields) -> PreTrainedConfig:
        """The config of a drafter for the target, whose tokens the model must have."""
        target = source.target
        if target is None:
            raise needs_target("which tokens the target has")
        tokenizer = read_vocabulary(source.folder)
        theirs = tokenizer_of(target.config._name_or_path)
        if tokenizer is None or theirs is None:
            whose = f"`{source.name}`" if tokenizer is None else f"the target {named(target)}"
            raise DrafterMismatchError(
                f"A diffusion model must have its target's tokens, which are compared, but {whose} brings no "
                "tokenizer. Put the files of its tokenizer beside its weights, and load the target by the name of "
                "that folder."
            )

        stock = self.stock[source.config["model_type"]]
        names = own_fields(type(AutoConfig.for_model(stock))) - _WINDOWS
        config = AutoConfig.for_model(stock, **picked({**source.config, **fields}, names))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        drafter = DiffusionDrafter.wrap(
            model,
            target,
            tokenizer=tokenizer,
            target_tokenizer=theirs,
            logits_shift=self.logits_shift,
            mask_token_id=self._mask(source, tokenizer.mask_token_id, config.vocab_size),
            **self._attention(source),
        )
        return drafter.config

    def _attention(self, source: Checkpoint) -> dict[str, Any]:
        """Who sees whom: all see all, or blocks of a fixed grid see themselves and earlier ones."""
        if self.needs_block or source.config.get(self.block_field) is not None:
            return {"attention": "block_causal", "block_size": source.value(self.block_field, SIZE)}

        if self.block_field:
            logger.warning(
                "`%s` is taken for a model all of whose tokens see all (MDLM), for its config names no `%s`. If it "
                "was trained in blocks (BD3-LM), say so in the drafter's config: `attention` is `block_causal`, "
                "`block_size` 32.",
                source.name,
                self.block_field,
            )
        return {"attention": "full"}

    def _mask(self, source: Checkpoint, of_tokenizer: int | None, size: int) -> int:
        """The mask that the config names, which `wrap` compares with the tokenizer's, or else the tokenizer's."""
        stated = source.config.get("mask_token_id")
        found = self.mask if of_tokenizer is None else of_tokenizer
        found = found if stated is None else stated
        if type(found) is not int or not 0 <= found < size:
            raise CheckpointError(
                f"The mask of `{source.name}` must be one of its {size} tokens, but it is {found!r}: `mask_token_id` "
                f"of its config is {stated!r}, its tokenizer's {of_tokenizer}. Fetch both again, or name it there."
            )
        return found
