"""MTP: the layer for multi-token prediction that a target's checkpoint carries drafts chains and trees.

The layer is Transformers' own, with the weights of the target's checkpoint, fed with its own states. Stock
`generate(..., use_mtp=True)` takes one token of each such layer in a step, a chain. Here one layer goes on from what
it gave, as that of Eagle does, so that trees of any depth are drafted. Source: arXiv 2412.19437, section 2.2.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import MtpModel
from typing_extensions import Self

from ..core.masks import additive
from ..errors import CheckpointError, OptionError
from ..generation.model_parts import device_of, named
from ..transformers_versions import CACHE
from .base import GrowingDrafter
from .checkpoint import check_finite
from .config_fields import PairConfig
from .eagle import EagleCandidateGenerator

READ = (-1,)  # the input of the head


@strict
class MtpConfig(PairConfig):
    """Configuration of [`MtpDrafter`]; what its layer is like stands in the target's own.

    It has the fields of [`~drafters.config_fields.PairConfig`]. `sliding_window` is that of the layer,
    `feature_layers` must be `[-1]`.

    Example:

    ```python
    >>> MtpConfig(hidden_size=64, num_attention_heads=4).feature_layers
    (-1,)

    ```
    """

    model_type = "mtp_spec"

    def check(self) -> None:
        """Refuse options out of range."""
        super().check()
        if tuple(self.feature_layers) != READ:
            raise OptionError(
                "An MTP layer reads the input of the head, so `feature_layers` must be [-1], but they are "
                f"{list(self.feature_layers)}. Leave them out."
            )
        if self.has_own_vocabulary:
            raise OptionError(
                "An MTP layer is not saved, nor is a list of tokens, so `draft_vocab_size` must be None, but it "
                f"is {self.draft_vocab_size}. Leave it out."
            )


FULL, SLIDING = "full_attention", "sliding_attention"
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers")  # of layers, in configs: the second is Qwen3.5's
_STOCK = "Stock `generate(..., use_mtp=True)` takes"
_MADE = (
    "An `MtpDrafter` must be made of its target, whose checkpoint holds its weights: `MtpDrafter.from_target(target)`,"
)


class MtpDrafter(GrowingDrafter):
    """Drafts with the MTP layer of the target's checkpoint, from the target's features, then from its own states.

    Its weights lie in the target's checkpoint and its embeddings and head are the target's, so there is nothing to
    train, save or publish. It is made of each target that was loaded: [`MtpDrafter.from_target`].

    Row p of the input holds the embedding of token p + 1 and the feature of token p; row p of the output is what token
    p + 2 follows from.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> MtpDrafter.from_target(AutoModelForCausalLM.from_pretrained("models/reference-target"))
    Traceback (most recent call last):
        ...
    transformers_falcon_spec.errors.OptionError: A target must carry one MTP layer to draft with, but ...

    ```
    """

    config: MtpConfig
    config_class = MtpConfig
    default_depth = 3
    has_window = True
    draft_token_ids = None  # all of the target's can be drafted, as they are
    _supports_sdpa = True

    def __init__(self, config: MtpConfig, mtp: MtpModel) -> None:
        super().__init__(config)
        self.post_init()  # before there are weights, which come from the checkpoint
        self.layer = mtp.layers[0]
        self.rotary_emb: Any = copy.deepcopy(mtp.rotary_emb)  # the target's own, which `to` must not change
        has_kinds = getattr(mtp, "has_per_layer_rope", False)  # newer Transformers tells them apart
        self._rotary_options = {"layer_type": _kind_of(mtp.config)} if has_kinds else {}

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A drafter of the MTP layer in the checkpoint that `target` was loaded from, in its type and on its device.

        `options` are fields of [`MtpConfig`].

        Raises:
            [`OptionError`]: the target has no MTP layer, several, or one that does not attend as others do; or an
                option is unknown or out of range.
            [`CheckpointError`]: its checkpoint does not hold the layer's weights, or they are not finite.
        """
        mtp = _loaded(target)
        window = mtp.config.sliding_window if _kind_of(mtp.config) == SLIDING else None
        drafter = cls(MtpConfig.from_target(target, **{"sliding_window": window, **options}), mtp).eval()
        check_finite(drafter, target.config._name_or_path)
        return drafter

    def fuse(self, features: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """The state that a row reads with its embedding: the feature, which the layer norms itself."""
        return features

    def attend(
        self,
        token_embeds: Float[Tensor, "rows tokens hidden"],
        states: Float[Tensor, "rows tokens hidden"],
        mask: Bool[Tensor, "masks tokens keys"],
        positions: Int[Tensor, "_ tokens"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """The layer over rows of embedding and state; keys and values go to `cache`, where one is given."""
        positions = positions + 1  # of the tokens, whose features stand before them
        return self.layer(
            token_embeds,
            states,
            position_embeddings=self.rotary_emb(states, positions, **self._rotary_options),
            attention_mask=additive(mask, states.dtype),
            position_ids=positions,
            **{CACHE: cache},
        )

    def fed_back(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """The state that the next row of a chain reads instead of a feature: it is normed as that is."""
        return states

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """There is nothing to save: [`OptionError`]."""
        raise OptionError(f"{_MADE} but it was to be saved. Save nothing, and call that where it is needed.")

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """No file holds it: [`OptionError`]."""
        raise OptionError(f"{_MADE} but it was to be loaded by name. Load the target, and call that.")


def _loaded(target: PreTrainedModel) -> MtpModel:
    """Transformers' own MTP model of a target, which attends by masks."""
    num_layers = _num_layers(target)
    if num_layers != 1:
        is_for_stock = num_layers and not target._is_stateful
        advice = f"{_STOCK} several." if is_for_stock else "Take another kind of drafter."
        raise OptionError(
            f"A target must carry one MTP layer to draft with, but {named(target)} has {num_layers} (`num_mtp_layers` "
            f"of its config). {advice}"
        )

    if getattr(getattr(target, "hf_quantizer", None), "pre_quantized", False):
        raise OptionError(
            f"An MTP layer must lie in the checkpoint as plain numbers, but that of {named(target)} is quantised, and "
            "Transformers loads the layer without its scales. Load a checkpoint that is not."
        )

    if not target.config._name_or_path:
        raise CheckpointError(
            "A target must be loaded from a checkpoint, which holds its MTP layer, but this "
            f"`{type(target).__name__}` was made anew. Load one with `from_pretrained`."
        )

    try:
        with _told_as_stock_asks(target):
            mtp = MtpModel.from_pretrained(target, device_map={"": device_of(target)})
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The folder or repository that {named(target)} was loaded from must hold the weights of its MTP layer, "
            f"but Transformers cannot load them: {' '.join(str(error).split())[:300]} Load the target from where it "
            "was published: saving a model leaves that layer out."
        ) from error

    if _kind_of(mtp.config) not in (FULL, SLIDING) or mtp.rotary_emb is None or mtp.use_shared_post_norm:
        raise OptionError(
            "An MTP layer must attend to the text with rotary positions and a norm of its own, but that of "
            f"{named(target)} is of another kind (`{_kind_of(mtp.config)}`). {_STOCK} it."
        )

    mtp.config._attn_implementation = "sdpa"  # which follows masks of trees, whatever the target has
    return mtp


def _num_layers(target: PreTrainedModel) -> int:
    """The MTP layers of a target by its config, or one where a hybrid leaves such weights out (Qwen3-Next)."""
    text_config = target.config.get_text_config(decoder=True)
    for name in COUNTS:
        if getattr(text_config, name, None) is not None:
            return int(getattr(text_config, name))

    left_out = target._keys_to_ignore_on_load_unexpected or ()
    return int(target._is_stateful and any(pattern.startswith("^mtp") for pattern in left_out))


@contextmanager
def _told_as_stock_asks(target: PreTrainedModel) -> Iterator[None]:
    """Inside, the config of a hybrid says of its MTP layer what Transformers asks for, which published ones do not."""
    told = target.config
    if target._is_stateful:
        target.config = copy.deepcopy(told)
        text_config = target.config.get_text_config(decoder=True)
        text_config.num_mtp_layers = 1
        text_config.mtp_layer_types = [FULL]
    try:
        yield
    finally:
        target.config = told


def _kind_of(config: Any) -> str:
    """What the MTP layer of this configuration attends to."""
    return (getattr(config, "layer_types", None) or [FULL])[0]


MtpDrafter.generator_class = EagleCandidateGenerator  # whose passes are the same, with the target's head
