"""Lengths of text at which targets may change their ways, as configs of families name them: what sets each to a length."""

from functools import cache
from typing import Any

import transformers

from tests.families import FAMILIES, NEWER, Fields

INSTALLED_NEWER = tuple(name for name, row in NEWER.items() if hasattr(transformers, row.config))
SCALINGS = ("dynamic", "longrope", "linear", "yarn", "llama3")  # of rotary positions
STEADY = ("linear", "yarn", "llama3")  # by which most families read all lengths alike
_ORIGINAL = "original_max_position_embeddings"
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_WINDOWS = {
    "sliding_window": 1,
    "sliding_window_size": 1,
    "local_attention": 2,
    "window_size": 1,
}  # how many for each token that is seen
_OF_ATTENTION = {
    "chunks": "attention_chunk_size",
    "temperature": "floor_scale",
    "index": "index_topk",
    "values": "keep_window_size",
    "log_scale": "log_scaling_n_floor",
    "distance": "rel_extent",
    "budget": "indexer_budget",
}
_THETA = 1e4
_NUM_BLOCKS = 2  # that attention chooses


def thresholds(family: str, length: int) -> dict[str, Fields]:
    """By the name of what may change at a text of `length` tokens, the fields of the family's config that say so."""
    config = _config(family)
    found: dict[str, Fields] = {}

    for name in _POSITIONS:
        if isinstance(getattr(config, name, None), int):
            found["positions"] = {name: length}
    for name, field in _OF_ATTENTION.items():
        if hasattr(config, field):
            found[name] = {field: length}
    windows = {name: times * length for name, times in _WINDOWS.items() if getattr(config, name, None)}
    if windows:
        found["window"] = windows
    if hasattr(config, "index_topk_blocks"):
        found["blocks"] = {"index_block_size": length // _NUM_BLOCKS, "index_topk_blocks": _NUM_BLOCKS}
    if "temperature" in found:
        found["temperature"] |= {"attn_scale": 1.0, "attn_temperature_tuning": True, "no_rope_layers": [1, 0, 0]}

    for scaling in _scalings_of(config):
        found[scaling] = _scaled(config, scaling, length)
    return found


@cache
def _config(family: str) -> Any:
    row = (FAMILIES | NEWER)[family]
    return getattr(transformers, row.config)(**row.fields)


def _scalings_of(config: Any) -> tuple[str, ...]:
    """The ways in which a family can scale its rotary positions."""
    if not getattr(config, "rope_parameters", None):
        return ()
    return ("longrope",) if config.model_type == "phi3" else SCALINGS


def _scaled(config: Any, scaling: str, length: int) -> Fields:
    """Rotary positions that are scaled; where kinds of layers have their own, those of one kind are."""
    usual = config.rope_parameters
    own = {kind: parameters for kind, parameters in usual.items() if isinstance(parameters, dict)}
    fields: Fields = {"max_position_embeddings": 4 * length if scaling == "longrope" else length}
    if getattr(config, "head_dim", 0) is None:  # Mixtral needs it to scale positions
        fields["head_dim"] = config.hidden_size // config.num_attention_heads
    if hasattr(config, _ORIGINAL):
        fields[_ORIGINAL] = length

    if not own:
        return fields | {"rope_parameters": _parameters(config, scaling, length, usual)}
    usual_kind = "full_attention" if "full_attention" in own else next(iter(own))
    is_full = own[usual_kind].get("rope_type") != "proportional"  # as those of Gemma 4 must be
    kind = usual_kind if is_full else "sliding_attention"
    return fields | {"rope_parameters": own | {kind: _parameters(config, scaling, length, own[kind])}}


def _parameters(config: Any, scaling: str, length: int, usual: Fields) -> Fields:
    share = usual.get("partial_rotary_factor", 1.0)
    found: Fields = {"rope_type": scaling, "rope_theta": _THETA, "factor": 4.0, "partial_rotary_factor": share}
    if scaling in {"longrope", "yarn", "llama3"}:
        found[_ORIGINAL] = length
    if scaling == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if scaling == "longrope":
        width = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        num_frequencies = int(width * share) // 2
        found |= {"short_factor": [1.0] * num_frequencies, "long_factor": [2.0] * num_frequencies}
    if config.model_type == "phimoe":  # scales the cosines, too, and otherwise behind a length
        found |= {"short_mscale": 1.0, "long_mscale": 1.5, _ORIGINAL: length}
    if "llama_4_scaling_beta" in usual:  # scales queries by their position
        found |= {"llama_4_scaling_beta": 0.5, _ORIGINAL: length}
    return found
