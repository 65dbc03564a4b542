"""DFlash: block diffusion, which fills in a block of masks in one pass (arXiv 2602.06036).

The drafters of Transformers' own loop, behind `generate(..., speculation_type="dflash")`, come first: they need
nothing of this package to run. The only classes of that kind are those of Muse-Glimmer's assistant; they take any
target whose embeddings, layers and head have one width.

The rest lets the same weights draft chains and trees in this package's loop. DFlash2 is read, too, which adds
convolutions over a block and scores between neighbours (z-lab/dflash, `dflash/model.py`), and so is DSpark, which has
such scores and drafts at the root's slot as well (arXiv 2607.05147; deepseek-ai/DeepSpec, `deepspec/modeling/dspark`).
A block of masks reads the new features and all text, and nodes of a depth share a slot. Position p of the text holds
the target's features of token p; the block begins with the newest token, which the target has not read yet. Between
steps the cache keeps keys and values of features alone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

from ..core.masks import additive
from ..core.options import option
from ..errors import DrafterMismatchError, OptionError
from ..generation.drafting import TargetView
from ..generation.head import head_width, inner_width
from ..generation.model_parts import check_can_be_assisted, device_of, embedding_width, in_layers, named
from ..generation.stock_cache import HOLE
from ..transformers_versions import CACHE
from .base import GrowingDrafter
from .config_fields import (
    DraftVocabularyConfig,
    check_fields,
    check_temperatures,
    context_of,
    num_heads,
    target_fields,
)
from .draft_vocabulary import DraftVocabulary
from .fingerprint import FIELD, TargetFingerprint
from .tree_drafting.proposing import PairGenerator

DEFAULT_FEATURES = 5  # layers of the target that are read
LEAST_BLOCK = 2  # the root and one token to draft
ATTENTION = "full_attention"  # in every layer; windows would be those of Muse-Glimmer


def make_dflash(target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A fresh DFlash drafter for `target`, on its device; `options` are fields of `MuseGlimmerAssistantConfig`.

    Without options it has 5 layers and reads 5 of the target's, spread evenly from the second to the third last; a
    mask holds the embedding of the pad token, or of the last one in the vocabulary where there is no pad token.

    Raises:
        [`TargetError`]: stock assisted generation does not serve the target.
        [`DrafterMismatchError`]: embeddings, layers and head of `target` differ in width, or it takes no positions.
        [`OptionError`]: an option that is no field, or one that the target or the training does not allow.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> make_dflash(target, num_hidden_layers=1, block_size=4).config.target_layer_ids
    [1, 2, 3]

    ```
    """
    check_can_be_assisted(target)
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise DrafterMismatchError(
            "DFlash needs a target that takes positions, since `generate` hands them on, but "
            f"`{type(target).__name__}` takes no `position_ids`. Train a drafter of another `method` for it."
        )
    config = config_for(MuseGlimmerAssistantConfig, target, options)
    if set(config.layer_types or ()) != {ATTENTION}:
        raise OptionError(f"`layer_types` must be `{ATTENTION}` in every layer, but they are {config.layer_types}.")
    return MuseGlimmerAssistantModel(config).eval().to(device=device_of(target))


def config_for(config_class: Any, target: PreTrainedModel, options: dict[str, Any]) -> Any:
    """A configuration of this class for `target`; `options` are fields of it, others an [`OptionError`]."""
    check_fields(config_class, options)
    text = target.config.get_text_config(decoder=True)
    widths = {"embeddings": embedding_width(target), "layers": text.hidden_size, "head": head_width(target)}
    if len(set(widths.values())) > 1:
        raise DrafterMismatchError(
            f"DFlash needs a target whose embeddings, layers and head have one width, but {named(target)} "
            f"has {widths}. Train a drafter of another `method` for it."
        )
    num_layers = options.get("num_hidden_layers", MuseGlimmerAssistantConfig.num_hidden_layers)
    config = config_class(**{**_sizes(target), "layer_types": [ATTENTION] * num_layers, **options})
    _check(config, text)
    return config


def context_layers(drafter: PreTrainedModel) -> tuple[int, ...]:
    """Hidden states of the target that this drafter reads; `target_layer_ids` count layers from 0."""
    return tuple(layer + 1 for layer in drafter.config.target_layer_ids)


def _sizes(target: PreTrainedModel) -> dict[str, Any]:
    """Fields that follow from the target."""
    text = target.config.get_text_config(decoder=True)
    heads = num_heads(text, text.hidden_size)
    first = min(1, text.num_hidden_layers - 2)
    last = max(text.num_hidden_layers - 3, first)
    spread = {first + round(number * (last - first) / (DEFAULT_FEATURES - 1)) for number in range(DEFAULT_FEATURES)}
    special_ids = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(text, name, None)
        special_ids[name] = ids[0] if isinstance(ids, list) else ids  # one has room

    pad = special_ids["pad_token_id"]
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": inner_width(target),
        "num_attention_heads": heads,
        "num_key_value_heads": in_layers(text, "num_key_value_heads")[0] or heads,
        "head_dim": in_layers(text, "head_dim")[0] or text.hidden_size // heads,
        "max_position_embeddings": context_of(target.config) or MuseGlimmerAssistantConfig.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        "target_layer_ids": sorted(spread),
        "mask_token_id": text.vocab_size - 1 if pad is None else pad,
        **special_ids,
    }


def _check_block_size(config: MuseGlimmerAssistantConfig) -> None:
    if config.block_size < LEAST_BLOCK:
        raise OptionError(
            f"`block_size` must be at least {LEAST_BLOCK}, the root included, but it is {config.block_size}."
        )


def _check(config: MuseGlimmerAssistantConfig, text: Any) -> None:
    """Refuse options that the target or the training does not allow."""
    _check_block_size(config)
    if config.hidden_size != text.hidden_size:
        raise OptionError(f"`hidden_size` must be the target's, {text.hidden_size}, but it is {config.hidden_size}.")
    if not 0 <= config.mask_token_id < text.vocab_size:
        raise OptionError(f"`mask_token_id` must lie in 0..{text.vocab_size - 1}, but it is {config.mask_token_id}.")
    layers, most = config.target_layer_ids or [], text.num_hidden_layers - 2
    if not layers or not all(0 <= layer <= most for layer in layers):
        raise OptionError(f"`target_layer_ids` must name layers in 0..{most}, but they are {layers}.")


HEAD_TYPES = ("vanilla", "gated")
LAYER_TYPES = ("full_attention", "sliding_attention")
SECOND_VERSION = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@strict
class DFlashConfig(DraftVocabularyConfig, MuseGlimmerAssistantConfig):
    """Configuration of [`DFlashDrafter`]; all fields of `MuseGlimmerAssistantConfig` are fields of it, too.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary; embeddings and head are the target's.
        causal_layer_types (`list[str]`, *optional*):
            The types of layers in which a token of a block sees no later one of it; None is none of them.
        input_embedding_scale (`float`, *optional*, defaults to 1.0): A factor of the embeddings of a block.
        output_multiplier (`float`, *optional*, defaults to 1.0): A factor of the head's logits.
        final_logit_softcapping (`float`, *optional*): What those then stay below, by a tanh; None is no bound.
        conv_kernel_size (`int`, *optional*): DFlash2: tokens of a block that its convolutions read; 0 is DFlash.
        conv_group_size (`int`, *optional*): DFlash2: channels whose kernels change together with the input.
        selector_rank (`int`, *optional*): DFlash2: rank of the scores between a token and the one before it.
        selector_top_k (`int`, *optional*): DFlash2: the best tokens of a mask, which alone can be drafted.
        markov_rank (`int`, *optional*): DSpark: rank of the scores between a token and the one before it; 0 is DFlash.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`):
            DSpark: `"gated"` scores are weighed by the state of the slot.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            DSpark: a token is drafted at the root's slot, too, so that a block drafts as many as it is long.
        draft_vocab_size (`int`, *optional*): Tokens that can be drafted; None is all of them.
        draft_tree (`dict`, *optional*):
            `{"parents": [...], "ranks": [...]}`, the static tree; None is a chain of a whole block.
        confidence_temperatures (`dict`, *optional*):
            How far trees that grow trust the drafter's probabilities, see [`PairConfig`].
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_fingerprint (`dict`, *optional*): What that target was, so that others are noticed; None checks sizes.

    Raises:
        [`OptionError`]: a block without masks, a mask outside the vocabulary, no layer to read, layers of a type that
            is not known, a part of DFlash2 alone, or scores of both DFlash2 and DSpark.

    Example:

    ```python
    >>> DFlashConfig(vocab_size=100, hidden_size=64, mask_token_id=3, block_size=4).block_size
    4

    ```
    """

    model_type = "dflash_spec"

    mask_token_id: int = 0
    eos_token_id: int | list[int] | None = 200001  # type: ignore[assignment]  # of some targets there are several
    causal_layer_types: list[str] | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = option(0, least=0)
    conv_group_size: int = option(0, least=0)
    selector_rank: int = option(0, least=0)
    selector_top_k: int = option(0, least=0)
    markov_rank: int = option(0, least=0)
    markov_head_type: str = option("vanilla", one_of=HEAD_TYPES)
    sample_from_anchor: bool = False
    confidence_temperatures: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        _check_block_size(self)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise OptionError(
                f"`mask_token_id` must lie in 0..{self.vocab_size - 1}, the target's vocabulary, but it is "
                f"{self.mask_token_id}. Take the target that the drafter was trained for."
            )
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise OptionError(
                "`target_layer_ids` must name layers of the target, counted from 0, but they are "
                f"{self.target_layer_ids}."
            )
        for name in ("layer_types", "causal_layer_types"):
            if not set(getattr(self, name) or ()) <= set(LAYER_TYPES):
                raise OptionError(f"`{name}` must be of {LAYER_TYPES}, but they are {getattr(self, name)}.")
        check_temperatures(self.confidence_temperatures, self.num_slots)

        sizes = [getattr(self, name) for name in SECOND_VERSION]
        if any(sizes) and not all(sizes):
            raise OptionError(f"DFlash2 needs all of {SECOND_VERSION}, each at least 1, but they are {sizes}.")
        if self.selector_rank and self.markov_rank:
            raise OptionError(
                "A token must be scored after its neighbour as in DFlash2 (`selector_rank`) or as in DSpark "
                f"(`markov_rank`), but both ranks are given: {self.selector_rank} and {self.markov_rank}. Leave one "
                "of them out."
            )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise OptionError(
                f"`conv_group_size` must divide `hidden_size`, but they are {self.conv_group_size} and "
                f"{self.hidden_size}."
            )
        if self.selector_top_k and self.has_own_vocabulary:
            raise OptionError(
                "The selector of DFlash2 scores all tokens, so `draft_vocab_size` must be None, but it is "
                f"{self.draft_vocab_size}. Leave it out."
            )
        if self.selector_top_k > self.vocab_size:
            raise OptionError(
                f"`selector_top_k` must be at most {self.vocab_size}, the vocabulary, but it is {self.selector_top_k}."
            )

    @property
    def num_slots(self) -> int:
        """Slots of a block at which a token is drafted."""
        return self.block_size - (not self.sample_from_anchor)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "DFlashConfig":
        """A configuration whose sizes fit `target`; `options` are fields, others an [`OptionError`]."""
        fingerprint = {FIELD: TargetFingerprint.of_target(target).to_json()}
        return config_for(cls, target, {**target_fields(target), **fingerprint, **options})


class BlockConvolution(nn.Module):
    """Convolutions before and after a part of a layer, in which a token of a block reads itself and those before it.

    Each channel has kernels of its own. What the token says, the same for all channels of a group, is added to them.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.num_taps = config.conv_kernel_size
        self.group_size = config.conv_group_size
        self.num_groups = config.hidden_size // self.group_size

        kernels = torch.zeros(2, self.num_taps, config.hidden_size)
        kernels[:, 0] = 1.0  # fresh ones change nothing
        self.base_kernel = nn.Parameter(kernels)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * self.num_groups, bias=False)

    def forward(
        self, states: Float[Tensor, "rows block hidden"], part: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "rows block hidden"]:
        """What `part` makes of states that are convolved first, convolved again."""
        changes = self.kernel_projection(states).unflatten(-1, (2, self.num_taps, self.num_groups))
        before, after = (self.base_kernel + changes.repeat_interleave(self.group_size, dim=-1)).unbind(dim=-3)
        return _convolved(part(_convolved(states, before)), after)


def _convolved(states: Tensor, kernels: Tensor) -> Tensor:
    """The sum over taps of a kernel `[rows, block, taps, hidden]` times the states so many tokens before."""
    length = states.shape[-2]
    parts = []
    for tap, kernel in enumerate(kernels.unbind(dim=-2)):
        before = functional.pad(states, (0, 0, tap, 0))[..., :length, :]
        parts.append(kernel * before)
    return torch.stack(parts).sum(dim=0)


class ConvolvedLayer(MuseGlimmerAssistantDecoderLayer):
    """A layer of Transformers' drafter with convolutions around attention and MLP."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # the model names all
        """As the stock layer computes it, apart from the convolutions."""

        def attend(states: Tensor) -> Tensor:
            return self.self_attn(hidden_states=states, **kwargs)[0]

        states = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attend)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)


class CandidateSelector(nn.Module):
    """Scores of the tokens of a mask after the one before it: a product of low rank, weighed by the mask's state."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Linear(config.selector_rank, config.vocab_size, bias=False)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(
        self, token_ids: Int[Tensor, "..."], states: Float[Tensor, "... hidden"]
    ) -> Float[Tensor, "... vocab"]:
        """The scores after `token_ids`, which are added to logits; `states` are those of the masks."""
        gates = self.hidden_projection(states)
        return self.successor_codebook(self.predecessor_codebook(token_ids) * gates)


class MarkovHead(nn.Module):
    """Scores of the tokens of a slot after the one before it: a product of low rank, or one that the state weighs."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draftable_tokens, bias=False)
        self.is_gated = config.markov_head_type == "gated"
        if self.is_gated:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(
        self, token_ids: Int[Tensor, "..."], states: Float[Tensor, "... hidden"]
    ) -> Float[Tensor, "... vocab"]:
        """The scores after `token_ids`, which are added to logits; `states` are those of the slots."""
        before = self.markov_w1(token_ids)
        if self.is_gated:
            before = self.gate_proj(torch.cat([states, before], dim=-1)).sigmoid() * before
        return self.markov_w2(before)


class DFlashDrafter(DraftVocabulary, GrowingDrafter, MuseGlimmerAssistantModel):
    """A drafter of a block of tokens in one pass, each a slot that knows nothing of the other slots' tokens.

    The last token of the text and masks behind it attend to one another and to features of the text, hidden states of
    several layers of the target; the target's head reads what comes out at the masks. Trees take the likeliest tokens
    of every slot; with a `draft_tree` that is a chain it drafts what stock `generate` does. Where the config has the
    parts of DFlash2 or DSpark, a token changes how likely those of the next slot are.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> drafter = DFlashDrafter.from_target(target, num_hidden_layers=1, block_size=4)
    >>> drafter.block_size, drafter.feature_layers
    (3, (2, 3, 4))

    ```
    """

    config: DFlashConfig
    config_class = DFlashConfig
    goes_on = False
    _supports_flash_attn = False  # masks say which slots of a cache hold text
    _supports_flex_attn = False

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.candidate_selector: Any = None
        if config.selector_rank:  # DFlash2
            self.layers = nn.ModuleList(ConvolvedLayer(config, index) for index in range(config.num_hidden_layers))
            self.candidate_selector = CandidateSelector(config)
        self.markov_head: Any = MarkovHead(config) if config.markov_rank else None  # DSpark
        self._list_tokens()

    def fill_in(
        self,
        noise_embeds: Float[Tensor, "rows block hidden"],
        features: Float[Tensor, "rows tokens feature"],
        mask: Bool[Tensor, "rows block keys"],
        sliding_mask: Bool[Tensor, "rows block keys"],
        positions: Int[Tensor, "rows tokens_and_block"],
        cache: Cache,
    ) -> Float[Tensor, "rows slots hidden"]:
        """What the target's head reads at each slot; keys and values of features and block go to `cache`."""
        masks = dict(zip(LAYER_TYPES, (mask, sliding_mask), strict=True))
        outputs = self(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            attention_mask={name: additive(seen, noise_embeds.dtype) for name, seen in masks.items()},
            position_ids=positions,
            **{CACHE: cache},
        )
        states: Tensor = outputs.last_hidden_state
        return states if self.config.sample_from_anchor else states[:, 1:]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's `hidden_states` that the drafter reads."""
        return context_layers(self)

    @property
    def feature_size(self) -> int:
        """Width of those together."""
        return self.config.hidden_size * len(self.feature_layers)

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass, one at each slot."""
        return self.config.num_slots

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for, as [`DrafterModel.check_target`] does."""
        most = model.config.get_text_config(decoder=True).num_hidden_layers - 2
        if max(self.feature_layers) - 1 > most:
            raise DrafterMismatchError(
                f"This drafter reads layers {self.config.target_layer_ids} of the target, so they must lie in "
                f"0..{most}, but one is above that in {named(model)}. Load the target it was trained for."
            )
        super().check_target(model)

    def compared_sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """By name each size that the drafter was made for, and that of a target."""
        return {**super().compared_sizes(model), "a head": (self.config.hidden_size, head_width(model))}

    def _check_tree(self, model: PreTrainedModel) -> None:
        super()._check_tree(model)
        top_k = self.generation_config.tree_top_k * self.is_tree_dynamic
        num_ranks = max(int(self.draft_tree.ranks.max()) + 1, top_k)
        most = self.config.selector_top_k
        if most and num_ranks > most:
            raise OptionError(
                f"The selector of this drafter chooses among the {most} best tokens of a mask (`selector_top_k`), but "
                f"`draft_tree` or `tree_top_k` asks for {num_ranks}. Take a narrower tree."
            )


class DFlashCandidateGenerator(PairGenerator):
    """One call's drafting with a [`DFlashDrafter`], in one pass; all rows together, each with its own past."""

    drafter: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.neighbours: Any = drafter.candidate_selector or drafter.markov_head  # None: a token changes nothing
        self.predicts_independently = self.neighbours is None

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  slots see features
        """Read new features, and fill in a block behind them: `[rows, 1, slots, hidden]`."""
        text = self.text
        num_tokens = self.drafter.config.block_size
        context = text.take_slots(features.shape[1], num, num_drafted=num_tokens)

        block = self.text.cache.lengths + num + torch.arange(num_tokens, device=num.device)
        held = text.slot_positions(block)
        is_text = torch.arange(held.shape[1], device=num.device) < text.num_shown
        held = held.masked_fill(is_text & (held >= block[:, :1]), HOLE)

        masks = torch.full_like(block[:, 1:], self.drafter.config.mask_token_id)
        noise = self.embed(torch.cat([text.roots, masks], dim=-1)) * self.drafter.config.input_embedding_scale
        positions = torch.cat([context, block], dim=-1)
        seen = self._seen(block, held)
        states: Tensor = self.run("fill_in", noise, self.to_drafter(features), *seen, positions, text.cache)
        text.forget_drafted()
        return states[:, None]

    def _seen(self, block: Tensor, held: Tensor) -> list[Tensor]:
        """For each of `LAYER_TYPES` the slots `[rows, tokens, slots]` that each token of a block sees."""
        config = self.drafter.config
        distance = held[:, None] - block[..., None]
        is_held = (held != HOLE)[:, None].expand_as(distance)
        seen = [is_held, is_held & (distance.abs() <= config.sliding_window)]
        for number, name in enumerate(LAYER_TYPES):
            if name in (config.causal_layer_types or ()):
                seen[number] = seen[number] & (distance <= 0)
        return seen

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the target's head alone, scaled as the drafter and not as the target does, as in training.

        Where a selector chooses among the best tokens of a mask, only those can be drafted.
        """
        config = self.drafter.config
        logits = self.target.head(features, is_scaled=False, rows=self.head_rows)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = (logits / config.final_logit_softcapping).tanh() * config.final_logit_softcapping
        if self.drafter.candidate_selector is None:
            return logits

        best = logits.topk(config.selector_top_k, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What the token before says."""
        return self.neighbours(token_ids[..., -1], self.to_drafter(prepared))


DFlashDrafter.generator_class = DFlashCandidateGenerator
