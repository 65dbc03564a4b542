"""Detecting the format of a foreign checkpoint from its config and the names of its weights, never from its own name.

The checks come in this order: the speculators type, the architectures, the fields of the config, the names of the
weights.
"""

import json
import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import MuseGlimmerAssistantConfig

from ..drafters.registry import drafter_classes
from ..errors import CheckpointError


class Format(Enum):
    """The formats that can be converted."""

    FALCON = "Falcon"
    EAGLE = "Eagle-1/2"
    EAGLE3 = "Eagle-3"
    EAGLE3_SPECULATORS = "Eagle-3 (speculators)"
    MEDUSA = "Medusa-1"
    MEDUSA_V2 = "Medusa v2 heads"
    DFLASH = "DFlash"
    DFLASH2 = "DFlash2"
    DFLASH_TRANSFORMERS = "DFlash (Transformers)"
    DFLASH_SPECULATORS = "DFlash (speculators)"
    DREAM = "Dream"
    A2D = "A2D"
    FAST_DLLM = "Fast-dLLM v2"
    DIFFULLAMA = "DiffuLLaMA"
    DIFFUGPT = "DiffuGPT"


# Formats that are recognised but cannot be converted: the reason, and what marks each: the value of a field of the
# config, a field that is neither missing, false nor null, or the names of weights. The first format that fits counts.
UNSUPPORTED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "unsupported.json").read_text("utf-8"))
NUM_NAMED = 8  # names shown in a message
LANGUAGE_MODEL = "a language model"
# Masked diffusion models, which have the weights of a language model, by their `model_type`.
DIFFUSION = {"Dream": Format.DREAM, "Fast_dLLM_Qwen": Format.FAST_DLLM}
DIFFUSION |= {f"a2d-{stock}": Format.A2D for stock in ("llama", "qwen2", "qwen3")}
SPECULATORS = {"eagle3": Format.EAGLE3_SPECULATORS, "dflash": Format.DFLASH_SPECULATORS}  # by their type
_NO_CODE = "The code that comes with it (`auto_map`) is never run. "
_DIFFUGPT, _LAYER = re.compile(r"denoise_model\.h\."), re.compile(r"model\.layers\.")
_MEDUSA_HEAD = re.compile(r"\d+\.\d+\.weight")  # a head's own LM head, the last of its layers


def refuse_by_config(config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose config shows that it cannot be converted, before any weights are read."""
    for field in ("speculators_model_type", "architectures", "model_type"):
        value = config.get(field)
        verb, values = ("names", value) if isinstance(value, list) else ("is", [value])
        for name, marks in UNSUPPORTED.items():
            if field in marks and marks[field] in values:
                raise _refused(name, f"`{field}` {verb} {marks[field]!r}")
    if (kind := config.get("speculators_model_type")) not in (None, *SPECULATORS):
        raise CheckpointError(
            f"`speculators_model_type` must be of {tuple(SPECULATORS)} to be converted, but it is {kind!r}, which is "
            "not known here. See `docs/convert.md`."
        )
    if str(config.get("model_type")) in drafter_classes():
        raise CheckpointError(
            f"`SOURCE` must be a checkpoint of other software, but its `model_type` is {config['model_type']!r}: a "
            f"drafter of this package. Load it with `from_pretrained`."
        )
    _refuse_by_fields(config)


def _refuse_by_fields(config: dict[str, Any]) -> None:
    inner = config.get("dflash_config")
    if isinstance(inner, dict) and (inner.get("causal_head") or inner.get("causal")):
        raise _refused("JetSpec", "`dflash_config` asks for a causal head")
    for name, marks in UNSUPPORTED.items():
        if value := config.get(marks.get("field", "")):
            raise _refused(name, f"`{marks['field']}` is {str(value)[:80]}")


def refuse_by_keys(keys: Collection[str], config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights have names of a format that cannot be converted, before any are read."""
    for name, marks in UNSUPPORTED.items():
        if name == LANGUAGE_MODEL and (str(config.get("model_type")) in DIFFUSION or _is_diffullama(config)):
            continue
        found = [key for key in keys if "weights" in marks and re.match(marks["weights"], key)]
        if found:
            raise _refused(name, f"there are weights called {shortened(found)}")


def detect(config: dict[str, Any], keys: Collection[str]) -> Format:
    """Detect the format of a checkpoint from its `config.json` and the names of its weights.

    `config` has as `mask_token_id` the mask that a tokenizer beside it names, if it names none itself.

    Raises:
        [`CheckpointError`]: a known format that is not converted, with the reason; an unknown one, with the fields of
            its config and the names of its weights, and their shapes if `keys` holds those.

    Example:

    ```python
    >>> detect({"k_mask": 2}, ["lstm.weight_ih_l0"])
    <Format.FALCON: 'Falcon'>

    ```
    """
    refuse_by_config(config)
    refuse_by_keys(keys, config)
    if (kind := DIFFUSION.get(str(config.get("model_type")))) is not None:
        return kind
    names = config.get("architectures") or ()
    is_eagle = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(keys) and "norm.weight" not in keys
    rules = (
        *((kind, config.get("speculators_model_type") == name) for name, kind in SPECULATORS.items()),
        (Format.FALCON, "k_mask" in config),
        (Format.DFLASH_TRANSFORMERS, config.get("model_type") == MuseGlimmerAssistantConfig.model_type),
        (Format.DFLASH2, "DFlash2DraftModel" in names),
        (Format.DFLASH, "DFlashDraftModel" in names or "dflash_config" in config),
        (_medusa(config, keys), "medusa_num_heads" in config or "medusa_num_layers" in config),
        (Format.EAGLE3, "draft_vocab_size" in config or any(key.startswith("midlayer.") for key in keys)),
        (Format.EAGLE, is_eagle),
        (Format.DIFFUGPT, config.get("model_type") == "gpt2" and any(map(_DIFFUGPT.match, keys))),
        (Format.DIFFULLAMA, _is_diffullama(config) and any(map(_LAYER.match, keys))),
    )
    for kind, fits in rules:
        if fits:
            return kind
    raise CheckpointError(
        f"The format must be one of {[each.value for each in Format]}, but neither config nor weights show "
        f"which. The config has the fields {sorted(config)} and `architectures` {config.get('architectures')}; the "
        f"weights are called {shortened(keys)}. {_NO_CODE if 'auto_map' in config else ''}See `docs/convert.md`; "
        "commands know a drafter of your own by `--import MODULE`."
    )


def _is_diffullama(config: dict[str, Any]) -> bool:
    """Whether a Llama has a mask, which no language model needs."""
    return config.get("model_type") == "llama" and config.get("mask_token_id") is not None


def _medusa(config: dict[str, Any], keys: Collection[str]) -> Format:
    """Distinguish Medusa heads with LM heads of their own and v2 heads, which end in the target's."""
    has_heads = str(config.get("version")) != "2" and any(_MEDUSA_HEAD.fullmatch(key) for key in keys)
    return Format.MEDUSA if has_heads else Format.MEDUSA_V2


def _refused(name: str, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"This is {name} ({evidence}), which cannot be converted: {UNSUPPORTED[name]['reason']} What can be is in "
        "`docs/convert.md`."
    )


def shortened(names: Any) -> str:
    """Shorten a list of names, or a dictionary, to its first few entries for an error message."""
    shown = dict(list(names.items())[:NUM_NAMED]) if isinstance(names, dict) else sorted(names)[:NUM_NAMED]
    more = len(names) - NUM_NAMED
    return f"{shown}" + (f" and {more} more" if more > 0 else "")
