"""A small model at the cost of a large one: zeros around its weights, layers that add nothing, the same function.

What changes nothing: a channel that is always zero, a head or an inner unit that nothing reads, a layer whose two outputs are
multiplied by zero. What would change something is taken back: RMSNorm divides by a mean over more channels (gains times
sqrt(H/H'), epsilon times H/H'), attention by the root of a wider head (queries times sqrt(d'/d)), rotary pairs turn at the
speed of their place (channel i moves to i d'/d). Ratios are powers of 4, so that both roots are powers of 2: scaling a bf16 or float32
number by those is exact, and what is left is the order in which kernels add.

New ids of a larger vocabulary hold the rows of the padding token, but must never be chosen, though a Llama head has no bias: n
copies would take n times its share, and tie with it. So one of the new channels, the first, becomes a bias: it holds the
constant c in every token, and only the head's rows of new ids read it, times -2^30. RMSNorm sees c where it saw a part of its
epsilon, e' H' + c^2 = e H with e and e' the epsilons, so that real logits stay as they were and new ids get logits of -10^4 or
lower, with probability zero in float32. The head is a table of its own then, for embeddings hold c and the head of real ids
must not. Sampling with a seed reads noise of another length; its distribution is the same, its text is not.
"""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..drafters.base import DrafterModel
from ..errors import OptionError
from .shapes import ZERO, Layout, Shape

_MUTE = -(2.0**30)  # weight of the constant channel in the logits of new ids
_ROPE_TYPES = ("default", "linear", "llama3")  # each pair's frequency follows from its own unscaled one
_LAYER = re.compile(r"layers\.(\d+)\.")
_TO_STREAM = re.compile(r"(o_proj|down_proj)\.(weight|bias)$")  # what a layer adds

# Which axes a weight has, by the end of its name, the first that fits; and the factor it takes.
RULES: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    (r"(embed_tokens|lm_head)\.weight", ("vocab", "hidden"), None),
    (r"q_proj\.weight", ("query", "hidden"), "query_factor"),
    (r"q_proj\.bias", ("query",), "query_factor"),
    (r"[kv]_proj\.weight", ("key", "hidden"), None),
    (r"[kv]_proj\.bias", ("key",), None),
    (r"o_proj\.weight", ("hidden", "query"), None),
    (r"(gate|up)_proj\.weight", ("inner", "hidden"), None),
    (r"(gate|up)_proj\.bias", ("inner",), None),
    (r"down_proj\.weight", ("hidden", "inner"), None),
    (r"(o|down)_proj\.bias", ("hidden",), None),
    (r"(^|_layer|\.)norm\.weight", ("hidden",), "gain_factor"),
    (r"block_position\.weight", ("same", "hidden"), None),
    (r"recurrence\.weight_ih_l0", ("gates", "fused"), None),
    (r"recurrence\.weight_[ih]h_l\d+", ("gates", "hidden"), None),
    (r"recurrence\.bias_[ih]h_l\d+", ("gates",), None),
)


@dataclass(frozen=True)
class Kind:
    """What is particular to a kind of model.

    Args:
        changes (`Callable`): Fields of its configuration beside those of [`Shape`].
        hold (`Callable`): Writes a constant into one channel of every token, in every stream that an RMSNorm or the head reads.
    """

    changes: Callable[[Any, int], dict[str, Any]]
    hold: Callable[[Any, int, float], None]


def _hold_in_embeddings(model: Any, channel: int, level: float) -> None:
    """Every embedding holds the constant, and the last norm lets it through to the head, whose new rows read it."""
    model.get_input_embeddings().weight[:, channel] = level
    model.get_decoder().norm.weight[channel] = 1.0


def _hold_in_recurrence(model: Any, channel: int, level: float) -> None:
    """One unit of the last LSTM: input gate and cell saturated, nothing remembered, so that the output gate sets its value."""
    hidden, last = model.config.hidden_size, model.config.num_recurrent_layers - 1
    share = level / math.tanh(1)
    bias = getattr(model.recurrence, f"bias_ih_l{last}")
    bias[channel::hidden] = torch.tensor([1e3, -1e3, 1e3, math.log(share / (1 - share))]).to(bias)


def _falcon_changes(config: Any, hidden_size: int) -> dict[str, Any]:
    """Widths of what it reads."""
    if config.embedding_size != config.hidden_size or config.feature_size % config.hidden_size:
        raise OptionError(
            f"`embedding_size` and the width of each feature must be `hidden_size`, {config.hidden_size}, but they are "
            f"{config.embedding_size} and {config.feature_size} for {len(config.feature_layers)} features."
        )
    return {"embedding_size": hidden_size, "feature_size": hidden_size * len(config.feature_layers)}


KINDS = {
    "llama": Kind(lambda _config, _hidden_size: {}, _hold_in_embeddings),
    "falcon_spec": Kind(_falcon_changes, _hold_in_recurrence),
}


def inflate(
    target: PreTrainedModel,
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """A model of `shape` that computes what `target` does, built on the device without a file.

    Args:
        target ([`~transformers.LlamaForCausalLM`]): The small model; it stays as it is.
        shape ([`Shape`]): The sizes of the large one; a larger vocabulary makes the head a table of its own.
        dtype (`torch.dtype`, *optional*): That of `target` if left out.
        device (`torch.device`, *optional*): That of `target` if left out.

    Returns:
        [`~transformers.PreTrainedModel`]: In the mode (training or not) and with the options of `target`.

    Raises:
        [`OptionError`]: a kind of model without rules, or a shape that cannot be exact.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> small = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    >>> large = inflate(small, Shape.of(small.config).widened(hidden_size=64, num_hidden_layers=3, vocab_size=90))
    >>> ids = torch.tensor([[3, 7, 5]])
    >>> torch.allclose(small(ids).logits, large(ids).logits[..., :50], atol=1e-4)
    True

    ```
    """
    return _inflated(
        target, Layout(Shape.of(target.config), shape, target.config.pad_token_id or 0), {}, dtype, device
    )


def inflate_drafter(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """A drafter for `inflate(target, shape)` that drafts what `drafter` does for `target`, as wide as one made for that shape.

    Its depth stays. Draft models that are Llamas of their own are widened by the same ratios.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): The small one; it stays as it is.
        target ([`~transformers.PreTrainedModel`]): The SMALL target.
        shape ([`Shape`]): The shape of the large target.
        dtype (`torch.dtype`, *optional*): That of `drafter` if left out.
        device (`torch.device`, *optional*): That of `drafter` if left out.

    Raises:
        [`OptionError`]: a kind of drafter without rules, or a shape that cannot be exact.
    """
    if not any(True for _ in drafter.parameters()):  # nothing to widen
        config = _config(drafter.config, {"vocab_size": shape.vocab_size})
        return _with_options(type(drafter)(config), drafter)
    config, small = drafter.config, Shape.of(target.config)
    changes: dict[str, Any] = {}
    num_fused = 0
    if isinstance(drafter, DrafterModel):
        num_fused = 1 + len(drafter.feature_layers)
        depth = small.num_hidden_layers if shape.num_hidden_layers > small.num_hidden_layers else None
        changes["feature_layers"] = [_feature_layer(layer, depth) for layer in drafter.feature_layers]
    own = Shape.of(config)
    layout = Layout(own, own.along(small, shape), config.pad_token_id or 0, num_fused)
    return _inflated(drafter, layout, changes, dtype, device)


def _feature_layer(layer: int, depth: int | None) -> int:
    """The same hidden state where layers follow the `depth` small ones: counted from the front; the head's input stays last."""
    if depth is None or layer == -1:
        return layer
    return -1 if layer == depth else layer if layer >= 0 else depth + 1 + layer


@torch.no_grad()
def _inflated(
    model: PreTrainedModel,
    layout: Layout,
    changes: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> PreTrainedModel:
    """Build the large model and fill it weight by weight."""
    kind = _kind(model)
    dtype = dtype or model.dtype
    if layout.has_new_ids and dtype == torch.float16:
        raise OptionError(
            "A larger `vocab_size` needs `dtype` bfloat16, float32 or float64: the weight that keeps new ids from being "
            "chosen is too large for float16."
        )
    level = _level(model.config.rms_norm_eps * layout.small.hidden_size) if layout.has_new_ids else 0.0
    epsilon = (model.config.rms_norm_eps * layout.small.hidden_size - level**2) / layout.large.hidden_size
    changes = {**asdict(layout.large), **kind.changes(model.config, layout.large.hidden_size), **changes}
    changes["rms_norm_eps"] = epsilon
    if layout.has_new_ids:
        changes["tie_word_embeddings"] = False
    with no_init_weights(), torch.device(device or model.device):
        large = type(model)._from_config(
            _config(model.config, changes),
            dtype=dtype,
            attn_implementation=model.config._attn_implementation,
        )
    large.tie_weights()
    weights = model.state_dict()
    for name, weight in large.named_parameters():
        _fill(weight, name, weights, layout)
    if layout.has_new_ids:
        _mute(large, kind, layout, level)
    return _with_options(large, model)


def _kind(model: PreTrainedModel) -> Kind:
    """What is particular to this model.

    Raises:
        [`OptionError`]: there are no rules for it.
    """
    name = model.config.model_type
    if name not in KINDS:
        raise OptionError(f"A model to inflate must be one of {sorted(KINDS)}, but this one is `{name}`.")
    rope_type = model.config.rope_parameters["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise OptionError(
            f"`rope_type` must be one of {_ROPE_TYPES}, whose frequencies do not depend on the width of a head, but it is "
            f"`{rope_type}`."
        )
    return KINDS[name]


def _level(room: float) -> float:
    """The constant of the new channel: the largest power of two whose square leaves at least half of `room`, the sum of epsilons."""
    if not room > 0:
        raise OptionError(
            f"A larger `vocab_size` needs a positive `rms_norm_eps`, part of which becomes a channel, but it gives {room}."
        )
    return 2.0 ** math.floor(math.log2(room / 2) / 2)


def _fill(weight: Tensor, name: str, weights: dict[str, Tensor], layout: Layout) -> None:
    """Write the small weight into a large one; layers beyond the small model's depth repeat its layers and add nothing."""
    weight.zero_()
    found = _LAYER.search(name)
    if found and int(found[1]) >= layout.small.num_hidden_layers:
        if _TO_STREAM.search(name):
            return
        name = name.replace(found[0], f"layers.{int(found[1]) % layout.small.num_hidden_layers}.")
    axes, factor = _rule(name)
    small = weights[name]
    places: list[Tensor] = []
    for axis, kind in enumerate(axes):
        source = torch.arange(len(small)) if kind == "same" else layout.source(kind)
        used = (source != ZERO).nonzero().squeeze(-1)
        small = small.index_select(axis, source[used].to(small.device))
        places.append(used.to(weight.device))
    scale = 1.0 if factor is None else getattr(layout, factor)
    weight[torch.meshgrid(*places, indexing="ij")] = (small * scale).to(weight)


def _rule(name: str) -> tuple[tuple[str, ...], str | None]:
    """Axes and factor of a weight.

    Raises:
        [`OptionError`]: no rule is for it.
    """
    for pattern, axes, factor in RULES:
        if re.search(rf"(?:{pattern})$", name):
            return axes, factor
    raise OptionError(f"The weight `{name}` must have a rule that says how it is widened. Add one to `RULES`.")


def _mute(large: Any, kind: Kind, layout: Layout, level: float) -> None:
    """Let the head's rows of new ids read a constant that is in every token."""
    channel = layout.small.hidden_size
    kind.hold(large, channel, level)
    head = large.get_output_embeddings()
    if head is not None:
        head.weight[layout.small.vocab_size :, channel] = _MUTE


def _config(config: Any, changes: dict[str, Any]) -> Any:
    """The same configuration with other sizes."""
    return type(config).from_dict({**config.to_dict(), **changes})


def _with_options(large: PreTrainedModel, small: PreTrainedModel) -> PreTrainedModel:
    """`large` with the mode and the options of `small`."""
    large.generation_config = copy.deepcopy(small.generation_config)
    return large.train(small.training)
