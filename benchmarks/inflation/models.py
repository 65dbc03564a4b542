"""A small model at the cost of a large one: zeros around its weights, layers that add nothing, the same function.

What changes nothing: a channel that is always zero, a head or an inner unit that nothing reads, a layer whose two outputs are
multiplied by zero. What would change something is taken back: RMSNorm divides by a mean over more channels (gains times
sqrt(H/H'), epsilon times H/H'), attention by the root of a wider head (queries times sqrt(d'/d)), rotary pairs turn at the
speed of their index (channel i moves to i d'/d). Ratios are powers of 4, so that both roots are powers of 2: scaling a bf16 or float32
number by those is exact, and what is left is the order in which kernels add.

New ids of a larger vocabulary hold the rows of the padding token, but must never be chosen, though a Llama head has no bias: n
copies would take n times its share, and tie with it. So one of the new channels, the first, becomes a bias: it holds a positive
number in whatever a head reads, and only the head's rows of new ids read it, times -2^58, so that new ids get logits of -10^4 or lower, with
probability zero in float32. A target's embeddings put the constant 2^-24 there, which its layers pass on and the last norm lets
through; heads that read features find it in those, and drafters that feed themselves add it anew in every pass, with the bias of their
last layer. RMSNorm sees it, but its square is lost in rounding beside the epsilon's share, which must be 2^-24 or more. The
head is a table of its own then, for embeddings hold the constant and the head of real ids must not. Sampling with a seed reads noise
of another length; its distribution is the same, its text is not.
"""

import copy
import re
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.drafters.diffuspec import DiffusionDrafter, NgramProxy
from transformers_falcon_spec.errors import OptionError

from .kinds import CONSTANT, KINDS, MUTE, RULES, Kind
from .shapes import ZERO, Layout, Shape

_ROPE_TYPES = ("default", "linear", "llama3")  # each pair's frequency follows from its own unscaled one
_LAYER = re.compile(r"layers\.(\d+)\.")
_TO_STREAM = re.compile(r"(o_proj|down_proj)\.(weight|bias)$")  # what a layer adds


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
    >>> large = inflate(small, Shape(64, 96, 3, 2, 2, 32, 90))
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

    Its depth stays. Draft models that are Llamas of their own are widened by the same ratios, and so is the one in a diffusion drafter.

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
    if isinstance(drafter, DiffusionDrafter):
        return _inflated_diffusion(drafter, target, shape, dtype=dtype, device=device)
    config, small = drafter.config, Shape.of(target.config)
    changes: dict[str, Any] = {}
    if isinstance(drafter, DrafterModel):
        depth = small.num_hidden_layers if shape.num_hidden_layers > small.num_hidden_layers else None
        changes["target_fingerprint"] = None  # that of the large target, which only the caller has
        changes["feature_layers"] = [_feature_layer(layer, depth) for layer in drafter.feature_layers]

    own = small.of_drafter(config)
    layout = Layout(own, own.along(small, shape), config.pad_token_id or 0)
    return _inflated(drafter, layout, changes, dtype, device)


@torch.no_grad()
def _inflated_diffusion(
    drafter: DiffusionDrafter, target: PreTrainedModel, shape: Shape, **kind: Any
) -> PreTrainedModel:
    """The same around a wider model, whose mask stands behind all tokens of the large target.

    Raises:
        [`OptionError`]: the mask does not stand behind all tokens of the small target.
    """
    config, size, num_ids = drafter.config, target.config.vocab_size, drafter.model.config.vocab_size
    if (config.mask_token_id, num_ids) != (size, size + 1):
        raise OptionError(
            f"A diffusion drafter to inflate must have the target's {size} tokens and the mask behind them, as "
            f"`DiffusionDrafter.from_target` makes it, but its model has {num_ids} tokens and the mask {config.mask_token_id}."
        )

    model = inflate_drafter(drafter.model, target, replace(shape, vocab_size=shape.vocab_size + 1), **kind)
    ends = torch.tensor([size, shape.vocab_size], device=model.device)
    tables: Any = {part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    for table in tables:  # one, where they are tied
        table[ends] = table[ends.flip(0)]
    sizes = dict.fromkeys(("vocab_size", "draft_vocab_size", "mask_token_id"), shape.vocab_size)
    changes = {**sizes, "draft_config": model.config.to_dict(), "target_fingerprint": None}
    with no_init_weights():
        large = DiffusionDrafter(_config(config, changes), model)
    large.proxy = None if drafter.proxy is None else _rebased(drafter.proxy, shape.vocab_size)
    return _with_options(large, drafter)


def _rebased(proxy: NgramProxy, vocab_size: int) -> NgramProxy:
    """The proxy of the same text over a larger vocabulary that begins with the same tokens."""
    rebased = copy.copy(proxy)
    rebased.vocab_size = vocab_size
    return rebased


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
    kind, config = _kind(model), model.config.to_dict()
    dtype = dtype or model.dtype
    sizes: dict[str, Any] = asdict(layout.large)
    if "rms_norm_eps" in config:
        sizes["rms_norm_eps"] = config["rms_norm_eps"] * layout.small.hidden_size / layout.large.hidden_size
    if layout.has_new_ids:
        _check_room(config, layout, dtype)
        sizes["tie_word_embeddings"] = False

    sizes = {**sizes, **kind.changes(model.config, layout), **changes}
    changes = {name: size for name, size in sizes.items() if name in config}  # kinds have sizes of their own
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
    kind.copy(large, model)
    if layout.has_new_ids:
        kind.hold(large, layout.small.hidden_size)
    return _with_options(large, model)


def _kind(model: PreTrainedModel) -> Kind:
    """What is particular to this model.

    Raises:
        [`OptionError`]: there are no rules for it.
    """
    name = model.config.model_type
    if name not in KINDS:
        raise OptionError(f"A model to inflate must be one of {sorted(KINDS)}, but this one is `{name}`.")
    rope = model.config.to_dict().get("rope_parameters")
    if rope is not None and rope["rope_type"] not in _ROPE_TYPES:
        raise OptionError(
            f"`rope_type` must be one of {_ROPE_TYPES}, whose frequencies do not depend on the width of a head, but it is "
            f"`{rope['rope_type']}`."
        )

    return KINDS[name]


def _check_room(config: dict[str, Any], layout: Layout, dtype: torch.dtype) -> None:
    """Refuse what leaves no room for new ids that are never chosen.

    Raises:
        [`OptionError`]: a type too narrow for the weight that mutes them, or epsilons that do not hide the constant.
    """
    if dtype == torch.float16:
        raise OptionError(
            "A larger `vocab_size` needs `dtype` bfloat16, float32 or float64: the weight that keeps new ids from being "
            "chosen is too large for float16."
        )

    least = CONSTANT**2 * 2**24 / layout.small.hidden_size  # half a unit in the last digit of float32
    if config.get("rms_norm_eps", least) < least:
        raise OptionError(
            f"A larger `vocab_size` needs an `rms_norm_eps` of at least {least:.1e}, beside which the channel that keeps new ids "
            f"from being chosen is lost in rounding, but it is {config['rms_norm_eps']}."
        )


def _fill(weight: Tensor, name: str, weights: dict[str, Tensor], layout: Layout) -> None:
    """Write the small weight into a large one; layers beyond the small model's depth repeat its layers and add nothing."""
    weight.zero_()
    found = _LAYER.search(name)
    if found and int(found[1]) >= layout.small.num_hidden_layers:
        if _TO_STREAM.search(name):
            return
        name = name.replace(found[0], f"layers.{int(found[1]) % layout.small.num_hidden_layers}.")

    axes, factor = _rule(name)
    if name not in weights:
        assert name.endswith("_proj.bias"), name  # one that only the constant needs
        return

    small = weights[name]
    indices: list[Tensor] = []
    for axis, what in enumerate(axes):
        source = layout.source(what, small.shape[axis])
        used = (source != ZERO).nonzero().squeeze(-1)
        small = small.index_select(axis, source[used].to(small.device))
        indices.append(used.to(weight.device))

    scale = 1.0 if factor is None else getattr(layout, factor)
    weight[torch.meshgrid(*indices, indexing="ij")] = (small * scale).to(weight)
    if axes == ("logits", "hidden") and layout.has_new_ids:
        weight[len(weights[name]) :, layout.small.hidden_size] = MUTE


def _rule(name: str) -> tuple[tuple[str, ...], str | None]:
    """Axes and factor of a weight.

    Raises:
        [`OptionError`]: no rule is for it.
    """
    for pattern, axes, factor in RULES:
        if re.search(rf"(?:{pattern})$", name):
            return axes, factor

    raise OptionError(f"The weight `{name}` must have a rule that says how it is widened. Add one to `RULES`.")


def _config(config: Any, changes: dict[str, Any]) -> Any:
    """The same configuration with other sizes."""
    return type(config).from_dict({**config.to_dict(), **changes})


def _with_options(large: PreTrainedModel, small: PreTrainedModel) -> PreTrainedModel:
    """`large` with the mode and the options of `small`."""
    if hasattr(small, "generation_config"):  # a DFlash drafter has none
        large.generation_config = copy.deepcopy(small.generation_config)
    return large.train(small.training)
