"""The target as the loop uses it: prefill, read a tree, keep a path, embed, head. Draws nothing and commits nothing."""

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..core.masks import additive, tree_mask
from ..core.tree import DraftTree
from . import cache as cache_file
from .rotary import read_anew, switch_lengths
from .taps import FeatureTaps

_ATTENTION_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reading:
    """What the target said of the tokens it read."""

    logits: Tensor  # [rows, nodes, vocab]; after a prefill of the newest token only: [rows, 1, vocab]
    features: Tensor | None  # [rows, tokens, feature_dim]
    outputs: Any = None  # the model's own, with hidden states and attentions where the call asks for them


@dataclass(frozen=True)
class LayerKind:
    """One kind of attention and what it may see."""

    name: str
    layer_index: int  # a layer of this kind that holds slots
    sliding_window: int | None = None
    chunk_size: int | None = None


class Target:
    """One `generate` call's hold on the target; also the `TargetView` that the drafter gets.

    Three numbers differ and are kept apart: slots in the cache (asked from it), the position of the next token (taken
    once after the prefill) and committed tokens (the loop's).
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int], has_hooks: bool = True) -> None:
        self.model: Any = model  # `PreTrainedModel` does not declare the parts of `generate`
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.config.vocab_size
        self.feature_dim: int = feature_width(model, feature_layers)
        self.taps = FeatureTaps(decoder_of(model), self.config.num_hidden_layers, feature_layers if has_hooks else ())
        self._untapped_layers = () if has_hooks else tuple(feature_layers)  # read from the outputs
        self.cache: Any = None
        self._kinds = layer_kinds(self.config)
        self._positions = torch.zeros(1, 1, dtype=torch.long)  # of the next token, [rows, 1] or [axes, rows, 1]
        self._is_held: Tensor | None = None  # [rows, prompt] False at padding; None without padding
        self._switches = switch_lengths(self.config)
        self._text_ids = torch.zeros(1, 0, dtype=torch.long)  # what the cache has read
        self._read_ids = self._text_ids  # the nodes read last
        self._asked: dict[str, bool] = {}  # outputs that every forward must give
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._lock = _ATTENTION_LOCKS.setdefault(model, threading.RLock())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., tokens, embed_dim]` of `[..., tokens]`."""
        return self.model.get_input_embeddings()(token_ids)

    def head(self, features: Tensor) -> Tensor:
        """Logits `[..., vocab]` in float32 of head inputs `[..., hidden]`, scaled and capped as the target does."""
        return apply_head(self.model, features)

    @property
    def room_to_context(self) -> int:
        """Tokens that fit between the next position and the end of the position table, or a switch of rotary frequencies."""
        longest, position = getattr(self.config, "max_position_embeddings", None), int(self._positions.max())
        ends = [length for length in self._switches if length > position]
        return min([*ends, 2**31 if longest is None else longest]) - 1 - position

    def prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Reading:
        """Read the prompt with the very call that plain decoding makes, features caught on the way."""
        self.cache = cache_file.prepared(model_kwargs["past_key_values"])
        mask = model_kwargs.get("attention_mask")
        num_cached = self.cache.get_seq_length()
        self._asked = {name: True for name in ("output_hidden_states", "output_attentions") if model_kwargs.get(name)}
        if self._untapped_layers:
            self._asked["output_hidden_states"] = True
        outputs = self.model._prefill(
            input_ids, generation_config, {**model_kwargs, **self._asked}, is_first_iteration=True
        )
        # Phi3 leaves the cache it was given when the prompt passes its switch
        self.cache = cache_file.prepared(outputs.past_key_values)
        cache_file.drop_last(self.cache, 0)
        self._text_ids = input_ids
        is_held = mask.bool() if isinstance(mask, Tensor) and mask.dim() == input_ids.dim() else None
        self._is_held = None if is_held is None or is_held.all() else is_held
        self._positions = self._next_position(outputs, model_kwargs)
        features = self.features(outputs, input_ids.shape[1] - num_cached)
        return Reading(outputs.logits[:, -1:], features, outputs)

    def _next_position(self, outputs: Any, model_kwargs: dict[str, Any]) -> Tensor:
        """Where the next token stands, as `prepare_inputs_for_generation` would place it."""
        model_kwargs = self.model._update_model_kwargs_for_generation(outputs, dict(model_kwargs))
        rows = outputs.logits.shape[0]
        placeholder = torch.zeros(
            rows, self.cache.get_seq_length() + 1, dtype=torch.long, device=outputs.logits.device
        )
        inputs = self.model.prepare_inputs_for_generation(placeholder, next_sequence_length=1, **model_kwargs)
        positions = inputs.get("position_ids")
        if positions is None:
            return torch.full((rows, 1), self.cache.get_seq_length(), device=placeholder.device)
        return positions[..., -1:]

    def read(self, token_ids: Tensor, tree: DraftTree, is_chain: bool = False) -> Reading:
        """Read a tree in one forward; its slots stay in the cache until `keep`.

        Args:
            token_ids (`torch.Tensor` of shape `(rows, nodes)`): The token at each node.
            tree ([`DraftTree`]): The shape.
            is_chain (`bool`): The tree is a chain and is read without a mask of ours, as plain decoding reads.
        """
        if self._text_ids.shape[1] in self._switches:
            self._read_anew(token_ids[:, :1])
        self._read_ids = token_ids
        inputs: dict[str, Any] = {"input_ids": token_ids, "past_key_values": self.cache, "use_cache": True}
        inputs |= self._asked
        if self._takes_positions:
            inputs["position_ids"] = self._positions + tree.depths
        if is_chain:
            inputs["attention_mask"] = self._chain_mask(token_ids)
            outputs = self.model(**inputs, return_dict=True)
        else:
            with self._tree_attention():
                inputs["attention_mask"] = self._masks(tree)
                outputs = self.model(**inputs, return_dict=True)
        return Reading(outputs.logits, self.features(outputs, token_ids.shape[1]), outputs)

    def _read_anew(self, root: Tensor) -> None:
        text_ids = torch.cat([self._text_ids, root], dim=-1)
        self.cache = read_anew(self.model, text_ids, self.cache, self._chain_mask(root))
        self.taps.discard()

    def features(self, outputs: Any, num_tokens: int) -> Tensor | None:
        """What the hooks caught of a forward; where they may not fire, the hidden states that it gave."""
        if not self._untapped_layers:
            return self.taps.take(num_tokens)
        return torch.cat([outputs.hidden_states[layer] for layer in self._untapped_layers], dim=-1)

    def keep(self, num_nodes: int, path: Sequence[int]) -> None:
        """Of the nodes read last keep those of `path`; the next root stands after them."""
        cache_file.keep_path(self.cache, num_nodes, path)
        self._text_ids = torch.cat([self._text_ids, self._read_ids[:, list(path)]], dim=-1)
        self._positions = self._positions + len(path)

    @contextmanager
    def released(self) -> Iterator[None]:
        """After this block, however it ends, no more trees are read: the cache records as plain decoding leaves it."""
        try:
            yield
        finally:
            if self.cache is not None:
                cache_file.stop_recording(self.cache)

    def _chain_mask(self, token_ids: Tensor) -> Tensor | None:
        """The 2-D mask of the whole text, needed only where the prompt is padded."""
        if self._is_held is None:
            return None
        num_new = self.cache.get_seq_length() + token_ids.shape[1] - self._is_held.shape[1]
        return torch.cat([self._is_held, self._is_held.new_ones(len(token_ids), num_new)], dim=-1).long()

    def _masks(self, tree: DraftTree) -> Tensor | dict[str, Tensor]:
        """One additive mask, or one for each kind of layer where the model looks them up by kind."""
        masks = {kind.name: self._mask(tree, kind) for kind in self._kinds}
        return masks if getattr(self.config, "layer_types", None) is not None else next(iter(masks.values()))

    def _mask(self, tree: DraftTree, kind: LayerKind) -> Tensor:
        num_seen, num_held = self.cache.get_seq_length(), cache_file.num_held(self.cache, kind.layer_index)
        slots = torch.arange(num_seen - num_held, num_seen, device=tree.parents.device)
        rows = tree.parents.shape[0]
        is_held, shift = None, torch.zeros(rows, 1, dtype=torch.long, device=slots.device)
        if self._is_held is not None:  # only padding on the left moves windows and chunks, as in Transformers
            shift = (self._is_held.cumsum(-1) == 0).sum(-1, keepdim=True)
            committed = self._is_held.new_ones(rows, num_seen - self._is_held.shape[1])
            is_held = torch.cat([self._is_held, committed], dim=-1)[:, num_seen - num_held :]
        places = slots.expand(rows, -1) - shift
        nodes = num_seen + tree.depths - shift
        mask = tree_mask(tree.ancestor_mask, nodes, places, is_held, kind.sliding_window, kind.chunk_size)
        return additive(mask, self.model.dtype)

    @contextmanager
    def _tree_attention(self) -> Iterator[None]:
        """Flash attention reads no tree mask: the target switches to SDPA (else eager) for this one forward."""
        implementation = self.config._attn_implementation
        if "flash" not in (implementation or ""):
            yield
            return
        with self._lock:  # the setting is shared by every thread that uses the model
            self.config._attn_implementation = "sdpa" if self.model._supports_sdpa else "eager"
            try:
                yield
            finally:
                self.config._attn_implementation = implementation


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kinds of attention in a model, by the rule of `masking_utils.create_masks_for_generate`."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        return [LayerKind("full_attention", 0, window, None if window else chunk)]
    limits = {"sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return [LayerKind(name, list(names).index(name), *limits.get(name, (None, None))) for name in dict.fromkeys(names)]


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None where it sees everything."""
    by_name = {kind.name: kind.sliding_window for kind in layer_kinds(config)}
    names = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [by_name[name] for name in names]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part whose output the head reads. Where a model names itself (text-only Llama 4), the part with the embeddings."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    embeddings = model.get_input_embeddings()
    return next(part for part in model.children() if any(inner is embeddings for inner in part.modules()))


def head_width(model: PreTrainedModel) -> int:
    """Width of what the head reads; not the hidden size where the decoder ends in a projection (OPT-350m)."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    return getattr(model.get_output_embeddings(), "in_features", hidden_size)


def embedding_width(model: PreTrainedModel) -> int:
    """Width of a token's embedding."""
    embeddings: Any = model.get_input_embeddings()  # an `nn.Embedding`, or a wrapper around one
    return embeddings.weight.shape[-1]


def feature_width(model: PreTrainedModel, feature_layers: Sequence[int]) -> int:
    """Width of one token's features; -1 is the input of the head."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    return sum(head_width(model) if layer == -1 else hidden_size for layer in feature_layers)


def apply_head(model: PreTrainedModel, features: Tensor) -> Tensor:
    """The model's own head with the scaling and caps that its configuration names; the probe checks that none is missed."""
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    narrowing = None if hasattr(config, "logits_scaling") else getattr(config, "dim_model_base", None)
    states = features if narrowing is None else features / (config.hidden_size / narrowing)
    logits = head(states.to(model.dtype)).float()  # a drafter may compute in another type than the target
    for name, is_divisor in (("logit_scale", False), ("logits_scaling", True), ("lm_head_multiplier", False)):
        factor = getattr(config, name, None)
        if factor is not None:
            logits = logits / factor if is_divisor else logits * factor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
