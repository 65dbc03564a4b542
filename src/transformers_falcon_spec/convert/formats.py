"""Detecting the format of a foreign checkpoint from its config and the names of its weights, never from its own name.

The checks come in this order: the speculators type, the architectures, the fields of the config, the names of the
weights.
"""

import re
from collections.abc import Collection
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


_PARALLEL = "it drafts all tokens of a block in one forward from mask tokens, and this package has no such drafter."
# Formats that are recognised but cannot be converted, and the reasons.
_UNSUPPORTED = {
    "A quantised checkpoint": "a drafter's weights must be plain numbers. Take the original.",
    "DFlash": _PARALLEL,
    "DFlash2": "its drafts come from mask tokens, convolutions and a selector, which no drafter here has.",
    "DSpark": "it drafts blocks with a Markov head and embeddings of its own, which no drafter here has.",
    "DeepSpec's Eagle-3": "it has embeddings of its own, while Eagle's are the target's.",
    "Domino": "it corrects its drafts with a GRU, which no drafter here has.",
    "FastMTP": "its layers are the target's own.",
    "Hydra": "its heads also read the tokens drafted before; Medusa's do not.",
    "JetSpec": _PARALLEL,
    "MTP": "its layers are the target's own.",
    "Medusa-2": "its target was trained together with the heads, so that they do not fit the original target.",
    "P-EAGLE": _PARALLEL,
    "SpecBlock": "it drafts blocks with shift and rank heads, which no drafter here has.",
    "Transformers' own DFlash": "load it with Transformers, as `assistant_model`.",
    "speculators' MLP": "no drafter here has that shape.",
    "speculators' form of Eagle-1": "its layer has other norms than Eagle's own. Convert the original.",
}
# Which of them the value of a field marks.
_VALUES = {
    "speculators_model_type": {
        "dflash": "DFlash",
        "dflash2": "DFlash2",
        "domino": "Domino",
        "dspark": "DSpark",
        "eagle": "speculators' form of Eagle-1",
        "fast_mtp": "FastMTP",
        "hydra": "Hydra",
        "jetspec": "JetSpec",
        "mlp": "speculators' MLP",
        "mtp": "MTP",
        "peagle": "P-EAGLE",
    },
    "architectures": {
        "DFlashDraftModel": "DFlash",
        "DFlash2DraftModel": "DFlash2",
        "LlamaForCausalLMSpecBlock": "SpecBlock",
        "Qwen3DSparkModel": "DSpark",
        "Qwen3Eagle3Model": "DeepSpec's Eagle-3",
    },
    "model_type": {"muse_glimmer_assistant": "Transformers' own DFlash"},
}
# Which of them a field marks that is neither missing, false nor null; the first one decides.
_FIELDS = {
    "parallel_drafting": "P-EAGLE",
    "hydra_num_heads": "Hydra",
    "diffspec_draft_token_num": "SpecBlock",
    "markov_rank": "DSpark",
    "gru_hidden_dim": "Domino",
    "dflash_config": "DFlash",
    "quantization_config": "A quantised checkpoint",
}
# Which of them the names of weights mark.
_KEYS = {
    r"medusa_head\.\d+\.": "Medusa-2",
    r"hydra_(mlp|lm_head)\.|hydra_head\.": "Hydra",
    r"prefix_gru\.": "Domino",
    r"markov_head\.": "DSpark",
    r"candidate_selector\.": "DFlash2",
    r"rank_head\.": "SpecBlock",
    r"mask_hidden$": "P-EAGLE",
    r"encoder\.fc\.": "Transformers' own DFlash",
}
_MEDUSA_HEAD = re.compile(r"\d+\.\d+\.weight")  # a head's own LM head, the last of its layers


def refuse_by_config(config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose config shows that it cannot be converted, before any weights are read."""
    for field, formats in _VALUES.items():
        value = config.get(field)
        verb, values = ("names", value) if isinstance(value, list) else ("is", [value])
        for each in values:
            if each in formats:
                raise _refused(formats[each], f"`{field}` {verb} {each!r}")
    if (kind := config.get("speculators_model_type")) not in (None, "eagle3"):
        raise CheckpointError(
            f"`speculators_model_type` must be 'eagle3' to be converted, but it is {kind!r}, which is not known here. "
            "See `docs/convert.md`."
        )
    if config.get("model_type") in drafter_classes():
        raise CheckpointError(
            f"`SOURCE` must be a checkpoint of other software, but its `model_type` is {config['model_type']!r}: a "
            f"drafter of this package. Load it with `from_pretrained`."
        )
    _refuse_by_fields(config)


def _refuse_by_fields(config: dict[str, Any]) -> None:
    inner = config.get("dflash_config")
    if isinstance(inner, dict) and (inner.get("causal_head") or inner.get("causal")):
        raise _refused("JetSpec", "`dflash_config` asks for a causal head")
    for field, name in _FIELDS.items():
        if config.get(field):
            raise _refused(name, f"`{field}` is {str(config[field])[:80]}")


def refuse_by_keys(keys: Collection[str]) -> None:
    """Refuse a checkpoint whose weights have names of a format that cannot be converted, before any are read."""
    for pattern, name in _KEYS.items():
        found = [key for key in keys if re.match(pattern, key)]
        if found:
            raise _refused(name, f"there are weights called {shortened(found)}")


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
    has_heads = str(config.get("version")) != "2" and any(_MEDUSA_HEAD.fullmatch(key) for key in keys)
    return Format.MEDUSA if has_heads else Format.MEDUSA_V2


def _refused(name: str, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"This is {name} ({evidence}), which cannot be converted: {_UNSUPPORTED[name]} What can be is in "
        "`docs/convert.md`."
    )
