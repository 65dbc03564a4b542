"""Llama-style decoder layers of foreign checkpoints: sizes, rotary positions and names of weights."""

from typing import Any

from transformers import LlamaConfig

from ..errors import CheckpointError

# The values that hold if a config of Eagle or Falcon does not give the field.
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
DEFAULT_THETA = 10000.0
MLP = ("gate_proj", "up_proj", "down_proj")
# Scalings that all software reads alike; in the published Eagle code `linear` and `dynamic` forget `rope_theta`.
SCALINGS = ("default", "llama3")


def layer_fields(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Read the sizes and rotary parameters of a foreign config under their names in `LlamaConfig`."""
    given = {field: config.get(field) for field in REQUIRED}
    missing = [field for field in REQUIRED if field not in config]
    wrong = {field: size for field, size in given.items() if type(size) is not int or size < 1}
    if wrong:
        raise CheckpointError(
            f"The config of `{name}` must give {REQUIRED} as positive whole numbers, but "
            f"{f'it lacks {missing}' if missing else f'some are {wrong}'}. Fetch the `config.json` of the drafter "
            "itself."
        )
    fields = given | {field: config.get(field, default) for field, default in DEFAULTS.items()}
    if config["hidden_size"] % config["num_attention_heads"]:
        raise CheckpointError(
            f"`hidden_size` must be a multiple of `num_attention_heads`, but the config of `{name}` has "
            f"{config['hidden_size']} and {config['num_attention_heads']}."
        )
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    fields["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return {**fields, "num_key_value_heads": heads, "rope_parameters": rope_parameters(config, name)}


def rope_parameters(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Read rotary parameters from a config of any version of Transformers, in the form of version 5."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_object = isinstance(scaling, dict)
    theta = (scaling if is_object else {}).get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    if not is_object or type(theta) not in (int, float) or not 0 < theta < float("inf"):
        raise CheckpointError(
            "Rotary positions must be described by an object and a `rope_theta` above 0, but the config of "
            f"`{name}` says {scaling!r} with {theta!r}. Fetch the `config.json` of the drafter itself."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    is_plain_linear = kind == "linear" and theta == DEFAULT_THETA
    if kind not in SCALINGS and not is_plain_linear:
        raise CheckpointError(
            f"Rotary positions must be of a kind in {SCALINGS}, or 'linear' with a `rope_theta` of "
            f"{DEFAULT_THETA:.0f}, but the config of `{name}` says {scaling} with {theta}. Other kinds are not "
            "converted: software reads them in different ways."
        )
    rest = {field: value for field, value in scaling.items() if field not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": kind, "rope_theta": float(theta), **rest}


def foreign_sizes(config: LlamaConfig) -> dict[str, Any]:
    """Return the sizes of a layer as a foreign config gives them: with the next one the reverse of `layer_fields`."""
    return {name: getattr(config, name) for name in (*REQUIRED, *DEFAULTS, "num_key_value_heads", "head_dim")}


def foreign_rope_fields(config: LlamaConfig) -> dict[str, Any]:
    """Return the rotary parameters in the form that every version of Transformers reads into a `LlamaConfig`."""
    assert config.rope_parameters is not None  # Transformers fills it in
    scaling: dict[str, Any] = dict(config.rope_parameters)
    theta = scaling.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def layer_names(foreign: str, ours: str, norms: tuple[str, ...], qkv_bias: bool = False) -> dict[str, str]:
    """Map names of one layer's weights (attention, MLP, `norms`) from the prefix `foreign` to the prefix `ours`."""
    parts = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
    parts += [f"self_attn.{each}_proj.bias" for each in "qkv"] if qkv_bias else []
    parts += [f"mlp.{each}.weight" for each in MLP] + [f"{norm}.weight" for norm in norms]
    return {f"{foreign}.{part}": f"{ours}.{part}" for part in parts}


def flag(config: dict[str, Any], field: str, default: bool, name: str) -> bool:
    """Read a field of a foreign config that must be true or false."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"`{field}` must be true or false, but the config of `{name}` says {value!r}.")
    return value
