"""Detecting the format of a foreign checkpoint from its config and the names of its weights, never from its own name.

The checks come in this order: the speculators type, the architectures, the fields of the config, the names of the
weights.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..drafters.registry import drafter_classes
from ..errors import CheckpointError
from .weight_files import shortened


class Format(Enum):
    """The formats that can be converted."""

    FALCON = "Falcon"
    EAGLE = "Eagle-1/2"
    EAGLE3 = "Eagle-3"
    EAGLE3_SPECULATORS = "Eagle-3 (speculators)"
    MEDUSA = "Medusa-1"
    MEDUSA_V2 = "Medusa v2 heads"


@dataclass(frozen=True)
class Unsupported:
    """A format that is recognised but cannot be converted, and the reason."""

    name: str
    reason: str


_PARALLEL = "it drafts all tokens of a block in one forward from mask tokens, and this package has no such drafter."
_DFLASH = Unsupported("DFlash", _PARALLEL)
_DFLASH2 = Unsupported(
    "DFlash2", "its drafts come from mask tokens, convolutions and a selector, which no drafter here has."
)
_DSPARK = Unsupported(
    "DSpark", "it drafts blocks with a Markov head and embeddings of its own, which no drafter here has."
)
_PEAGLE = Unsupported("P-EAGLE", _PARALLEL)
_SPECBLOCK = Unsupported("SpecBlock", "it drafts blocks with shift and rank heads, which no drafter here has.")
_HYDRA = Unsupported("Hydra", "its heads also read the tokens drafted before; Medusa's do not.")
_DOMINO = Unsupported("Domino", "it corrects its drafts with a GRU, which no drafter here has.")
_JETSPEC = Unsupported("JetSpec", _PARALLEL)
_MEDUSA2 = Unsupported(
    "Medusa-2", "its target was trained together with the heads, so that they do not fit the original target."
)

_SPECULATORS = {
    "eagle": Unsupported(
        "speculators' form of Eagle-1", "its layer has other norms than Eagle's own. Convert the original."
    ),
    "peagle": _PEAGLE,
    "dflash": _DFLASH,
    "dflash2": _DFLASH2,
    "dspark": _DSPARK,
    "domino": _DOMINO,
    "jetspec": _JETSPEC,
    "hydra": _HYDRA,
    "mlp": Unsupported("speculators' MLP", "no drafter here has that shape."),
    "mtp": Unsupported("MTP", "its layers are the target's own."),
    "fast_mtp": Unsupported("FastMTP", "its layers are the target's own."),
}
_ARCHITECTURES = {
    "DFlashDraftModel": _DFLASH,
    "DFlash2DraftModel": _DFLASH2,
    "Qwen3DSparkModel": _DSPARK,
    "Qwen3Eagle3Model": Unsupported(
        "DeepSpec's Eagle-3", "it has embeddings of its own, while Eagle's are the target's."
    ),
    "LlamaForCausalLMSpecBlock": _SPECBLOCK,
}
# A field marks a format if it is neither missing, false nor null; the first match decides.
_FIELDS = {
    "parallel_drafting": _PEAGLE,
    "hydra_num_heads": _HYDRA,
    "diffspec_draft_token_num": _SPECBLOCK,
    "markov_rank": _DSPARK,
    "gru_hidden_dim": _DOMINO,
    "dflash_config": _DFLASH,
    "quantization_config": Unsupported(
        "A quantised checkpoint", "a drafter's weights must be plain numbers. Take the original."
    ),
}
_MODEL_TYPES = {
    "muse_glimmer_assistant": Unsupported(
        "Transformers' own DFlash", "load it with Transformers, as `assistant_model`."
    ),
}
_KEYS = {
    r"medusa_head\.\d+\.": _MEDUSA2,
    r"hydra_(mlp|lm_head)\.|hydra_head\.": _HYDRA,
    r"prefix_gru\.": _DOMINO,
    r"markov_head\.": _DSPARK,
    r"candidate_selector\.": _DFLASH2,
    r"rank_head\.": _SPECBLOCK,
    r"mask_hidden$": _PEAGLE,
    r"encoder\.fc\.": _MODEL_TYPES["muse_glimmer_assistant"],
}
_MEDUSA_HEAD = re.compile(r"\d+\.\d+\.weight")  # a head's own LM head, the last of its layers


def refuse_by_config(config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose config shows that it cannot be converted, before any weights are read."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind in _SPECULATORS:
            raise _refused(_SPECULATORS[kind], f"`speculators_model_type` is {kind!r}")
        if kind != "eagle3":
            raise CheckpointError(
                f"`speculators_model_type` must be 'eagle3' to be converted, but it is {kind!r}, which is not known "
                f"here. See `docs/convert.md`."
            )
    for name in config.get("architectures") or ():
        if name in _ARCHITECTURES:
            raise _refused(_ARCHITECTURES[name], f"`architectures` names {name!r}")
    if config.get("model_type") in _MODEL_TYPES:
        raise _refused(_MODEL_TYPES[config["model_type"]], f"`model_type` is {config['model_type']!r}")
    if config.get("model_type") in drafter_classes():
        raise CheckpointError(
            f"`SOURCE` must be a checkpoint of other software, but its `model_type` is {config['model_type']!r}: a "
            f"drafter of this package. Load it with `from_pretrained`."
        )
    _refuse_by_fields(config)


def _refuse_by_fields(config: dict[str, Any]) -> None:
    """Refuse a config with a field that only formats which cannot be converted have."""
    inner = config.get("dflash_config") or {}
    if isinstance(inner, dict) and (inner.get("causal_head") or inner.get("causal")):
        raise _refused(_JETSPEC, "`dflash_config` asks for a causal head")
    for field, unsupported in _FIELDS.items():
        if config.get(field):
            raise _refused(unsupported, f"`{field}` is {str(config[field])[:80]}")


def refuse_by_keys(keys: Collection[str]) -> None:
    """Refuse a checkpoint whose weights have names of a format that cannot be converted, before any are read."""
    for pattern, unsupported in _KEYS.items():
        found = [key for key in keys if re.match(pattern, key)]
        if found:
            raise _refused(unsupported, f"there are weights called {shortened(found)}")


def detect(config: dict[str, Any], keys: Collection[str]) -> Format:
    """Detect the format of a checkpoint.

    Args:
        config (`dict`): Its `config.json`.
        keys (`Collection[str]`): Names of its weights.

    Raises:
        [`CheckpointError`]: a known format that is not converted, with the reason; an unknown one, with what was seen.

    Example:

    ```python
    >>> detect({"k_mask": 2}, ["lstm.weight_ih_l0"])
    <Format.FALCON: 'Falcon'>

    ```
    """
    refuse_by_config(config)
    refuse_by_keys(keys)
    is_eagle = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(keys) and "norm.weight" not in keys
    rules = (
        (Format.EAGLE3_SPECULATORS, config.get("speculators_model_type") == "eagle3"),
        (Format.FALCON, "k_mask" in config),
        (_medusa(config, keys), "medusa_num_heads" in config or "medusa_num_layers" in config),
        (Format.EAGLE3, "draft_vocab_size" in config or any(key.startswith("midlayer.") for key in keys)),
        (Format.EAGLE, is_eagle),
    )
    for kind, fits in rules:
        if fits:
            return kind
    raise CheckpointError(
        f"The format must be one of {[each.value for each in Format]}, but neither the config nor the weights tell "
        f"which. The config has the fields {sorted(config)} and `architectures` {config.get('architectures')}; the "
        f"weights are called {shortened(keys)}. See `docs/convert.md`."
    )


def _medusa(config: dict[str, Any], keys: Collection[str]) -> Format:
    """Tell Medusa heads with LM heads of their own from v2 heads, which end in the target's."""
    if str(config.get("version")) == "2":
        return Format.MEDUSA_V2
    has_heads = any(_MEDUSA_HEAD.fullmatch(key) for key in keys)
    return Format.MEDUSA if has_heads else Format.MEDUSA_V2


def _refused(found: Unsupported, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"This is {found.name} ({evidence}), which cannot be converted: {found.reason} What can be is in "
        "`docs/convert.md`."
    )
