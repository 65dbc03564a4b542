"""What is particular to each kind of model that can be inflated: the axes of its weights, and where it holds a constant.

Knows nothing of how weights are filled; that is `models.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from transformers_falcon_spec import DFlashConfig
from transformers_falcon_spec.errors import OptionError

from .shapes import Layout

CONSTANT = 2.0**-24  # in the channel that new ids read
MUTE = -(2.0**58)  # weight of that channel in the logits of new ids

# Which axes a weight has, by the end of its name, the first that fits; and the factor it takes. Axes are those of `Layout`.
RULES: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    (r"embed_tokens\.weight", ("ids", "hidden"), None),
    (r"lm_head\.weight", ("logits", "hidden"), None),
    (r"q_proj\.weight", ("query", "hidden"), "query_factor"),
    (r"q_proj\.bias", ("query",), "query_factor"),
    (r"[kv]_proj\.weight", ("key", "hidden"), None),
    (r"[kv]_proj\.bias", ("key",), None),
    (r"o_proj\.weight", ("hidden", "query"), None),
    (r"(gate|up)_proj\.weight", ("inner", "hidden"), None),
    (r"(gate|up)_proj\.bias", ("inner",), None),
    (r"down_proj\.weight", ("hidden", "inner"), None),
    (r"(o|down)_proj\.bias", ("hidden",), None),
    (r"(^|_layer|\.|hidden_|input_)norm\.weight", ("hidden",), "gain_factor"),
    # DFlash has norms over heads: that of queries, which come scaled, sees the mean square of the small head
    (r"q_norm\.weight", ("head",), None),
    (r"k_norm\.weight", ("head",), "head_gain_factor"),
    (r"output_norm_enc\.weight", ("hidden",), "gain_factor"),
    # Falcon
    (r"block_position\.weight", ("same", "hidden"), None),
    (r"recurrence\.weight_[ih]h_l\d+", ("hidden", "hidden"), None),
    (r"recurrence\.bias_[ih]h_l\d+", ("hidden",), None),
    (r"(shortcut|newest)\.weight", ("hidden", "hidden"), None),
    (r"transition\.before\.weight", ("ids", "same"), None),
    (r"transition\.(gate|up|up_tokens)\.weight", ("same", "hidden"), None),
    (r"transition\.after\.weight", ("logits", "same"), None),
    (r"transition\.down\.weight", ("same", "same"), None),
    # Eagle
    (r"(^|\.)fc\.weight", ("hidden", "hidden"), None),
    (r"(^|\.)fc\.bias", ("hidden",), None),
    (r"fc_norm\.\d+\.weight", ("hidden",), "gain_factor"),
    # Medusa
    (r"heads\.\d+\.\d+\.linear\.weight", ("hidden", "hidden"), None),
    (r"heads\.\d+\.\d+\.linear\.bias", ("hidden",), None),
    (r"heads\.\d+\.\d+\.weight", ("logits", "hidden"), None),
)


@dataclass(frozen=True)
class Kind:
    """What is particular to a kind of model.

    Args:
        changes (`Callable`): Fields of its configuration beside those of [`Shape`].
        hold (`Callable`): Has a positive number in one channel of whatever a head reads. Called where there are new ids.
        copy (`Callable`): Copies to the large model what the small one holds beside weights.
    """

    changes: Callable[[Any, Layout], dict[str, Any]] = lambda _config, _layout: {}
    hold: Callable[[Any, int], None] = lambda _model, _channel: None
    copy: Callable[[Any, Any], None] = lambda _large, _small: None


def _hold_in_embeddings(model: Any, channel: int) -> None:
    """Every embedding holds the constant, and the last norm lets it through to the head."""
    model.get_input_embeddings().weight[:, channel] = CONSTANT
    model.get_decoder().norm.weight[channel] = 1.0


def _hold_in_last_norm(model: Any, channel: int) -> None:
    """The constant comes with the target's embeddings, and the last norm lets it through to the target's head."""
    model.norm.weight[channel] = 1.0


def _set_head_epsilons(large: Any, small: Any) -> None:
    """The configuration's epsilon is right for norms over the width; those over a head see other zeros, or none. Files cannot say so."""
    epsilon = small.config.rms_norm_eps
    for layer in large.layers:
        layer.self_attn.q_norm.variance_epsilon = epsilon
        layer.self_attn.k_norm.variance_epsilon = epsilon * small.config.head_dim / large.config.head_dim


def _hold_in_bias(model: Any, channel: int) -> None:
    """The last layer adds the constant to its output in every pass, whatever was fed back."""
    layers = [part for part in model.modules() if isinstance(part, LlamaMLP)]
    layers[-1].down_proj.bias[channel] = CONSTANT


def _hold_in_eagle(model: Any, channel: int) -> None:
    """Version 3 has a norm before its head, which lets the constant through."""
    _hold_in_bias(model, channel)
    if model.config.version != 1:
        model.norm.weight[channel] = 1.0


def _reader_changes(config: Any, layout: Layout) -> dict[str, Any]:
    """Widths of what a drafter reads; and biases for the constant, zeros otherwise."""
    num_features = len(config.feature_layers)
    if config.embedding_size != config.hidden_size or config.feature_size != config.hidden_size * num_features:
        raise OptionError(
            f"`embedding_size` and the width of each feature must be `hidden_size`, {config.hidden_size}, but they are "
            f"{config.embedding_size} and {config.feature_size} for {num_features} features."
        )

    hidden_size = layout.large.hidden_size
    return {
        "embedding_size": hidden_size,
        "feature_size": hidden_size * num_features,
        "mlp_bias": config.mlp_bias or layout.has_new_ids,
    }


def _eagle_changes(config: Any, layout: Layout) -> dict[str, Any]:
    """Its vocabulary, too: in proportion, or all of the target's."""
    num_tokens = layout.num_ids(config.draft_vocab_size) if config.has_own_vocabulary else None
    return {**_reader_changes(config, layout), "draft_vocab_size": num_tokens}


def _copy_draft_vocabulary(large: Any, small: Any) -> None:
    """The ids that can be drafted, and new ones for the rows that the large head has beside theirs."""
    if small.draft_token_ids is None:
        return
    old = small.draft_token_ids.to(large.device)
    indices = torch.arange(len(large.d2t), device=large.device)
    ids = torch.cat([old, indices[len(old) :] - len(old) + small.config.vocab_size])
    large.d2t.copy_(ids - indices)
    large.t2d.zero_()[ids] = True


KINDS = {
    "llama": Kind(hold=_hold_in_embeddings),
    "falcon_spec": Kind(_reader_changes, _hold_in_bias),
    "eagle_spec": Kind(_eagle_changes, _hold_in_eagle, _copy_draft_vocabulary),
    MuseGlimmerAssistantConfig.model_type: Kind(hold=_hold_in_last_norm, copy=_set_head_epsilons),
    DFlashConfig.model_type: Kind(hold=_hold_in_last_norm, copy=_set_head_epsilons),
    "medusa_spec": Kind(),  # its heads add nothing to the channel of the feature that they read
}
