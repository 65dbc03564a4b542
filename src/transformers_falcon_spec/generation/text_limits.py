"""Lengths of text at which a target reads otherwise: frequencies switch, an index is full, or positions end."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import GenerationError
from ..transformers_versions import CACHE, FORGETS_DROPPED_TEXT
from .inputs import grown, longest_text, text_length
from .model_parts import decoder_of, named, once_a_model, reads_as_usual
from .stock_cache import ENDLESS, drop_last, new_cache

_CONTEXTS = ("max_position_embeddings", "max_seq_len")  # names by which configs give the positions of a model
_MOST_EXTRA_ROWS = 8  # of a table of positions: OPT counts from 2 on
_MATRIX = 2  # dimensions


@dataclass(frozen=True)
class TextLimits:
    """The lengths of text that a target cannot pass in the middle of a draft."""

    switches: Sequence[int]  # after which other rotary frequencies hold for all tokens of a forward
    num_positions: int  # for which it has positions, or after which `dynamic` frequencies change with each token
    num_indexed: int  # of which an attention index (DeepSeek V3.2) keeps every token
    num_chosen: int  # of which an attention that chooses by values (Doge) keeps every token
    num_in_blocks: int = ENDLESS  # slots of which blocks (MiniMax-M3) are all read
    num_unscaled: int = ENDLESS  # columns behind which queries are scaled by how many there are (Inkling)
    slot_period: int = 0  # slots after which an attention that counts them (Llama 4) scales its queries anew

    @cached_property
    def may_end_drafts(self) -> bool:
        """Whether drafts may have to end before the text does; most targets have no such limit."""
        return bool(self.switches) or min(self.num_positions, self.num_indexed) < ENDLESS

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "TextLimits":
        """The limits of a model; endless where nothing limits it, as with rotary positions, scaled or not."""
        config = model.config.get_text_config(decoder=True)
        context = _named_context(config)
        num_positions = context if context is not None and changes_with_length(config) else num_tabled(model)
        # The index gives exact zeros to several tokens at once. Which of them it keeps depends on how many slots are
        # compared, and a tree fills more slots than plain decoding does.
        is_indexed = not reads_as_usual(config)  # with layers that keep an index, Dots 3 may have none
        num_indexed = (is_indexed and getattr(config, "index_topk", None)) or ENDLESS
        num_chosen = getattr(config, "keep_window_size", None) or ENDLESS

        block_size = getattr(config, "index_block_size", None) or ENDLESS
        num_in_blocks = block_size * (getattr(config, "index_topk_blocks", None) or 1)
        is_scaled = getattr(config, "attn_temperature_tuning", False) and hasattr(config, "floor_scale")
        slot_period = int(config.floor_scale) if is_scaled else 0
        num_unscaled = getattr(config, "log_scaling_n_floor", None) or ENDLESS
        nums = (num_positions, num_indexed, num_chosen, num_in_blocks, num_unscaled)
        return cls(switch_lengths(config), *nums, slot_period)

    def of_call(self, max_length: int) -> "TextLimits":
        """The limits of a text that may become so long.

        Values of drafted tokens may be rounded otherwise than those of tokens that were read alone. An attention that
        chooses by them would keep others, so that nothing is drafted in a text for which it must choose.
        """
        return replace(self, num_indexed=0) if max_length > self.num_chosen else self

    def counts_slots(self, num_slots: int, end: int) -> bool:
        """Whether what is read from `num_slots` up to `end` depends on the slots in which tokens stand.

        Nodes of a tree stand in later slots than plain decoding gives them, as do tokens of rows at their own pace.
        """
        is_rescaled = bool(self.slot_period) and num_slots // self.slot_period != end // self.slot_period
        return is_rescaled or end > self.num_in_blocks

    def notes(self, max_length: int) -> list[str]:
        """What a text that may become so long is told, one sentence each."""
        found = []
        if max_length > self.num_indexed:
            found.append(
                f"The target's attention keeps {self.num_indexed} tokens of a text by an index, so drafting ends "
                "where a text is longer than that."
            )

        if self.counts_slots(0, max_length):
            length = self.slot_period or self.num_in_blocks
            found.append(
                f"The target counts slots of the cache at {length} tokens: there a text is drafted by chains, and a "
                "batch that may become so long by no drafts at all."
            )

        if max_length > self.num_chosen:
            found.append(
                f"The target's attention keeps {self.num_chosen} tokens of a text by their values, so nothing is "
                "drafted where a text may become longer."
            )

        if max_length > self.num_positions:
            found.append(
                f"The target has positions for {self.num_positions} tokens, or changes them with each token behind, "
                "so drafting ends there."
            )

        return found

    def num_draftable(self, text_len: int, counts: Iterable[tuple[int, int]]) -> list[int]:
        """For each row the number of tokens that can be drafted before a limit.

        `counts` are each row's next position id and tokens; frequencies switch with `text_len`, without padding.
        """
        limits = [*self.switches, self.num_positions]
        before_switch = _num_before_limit(text_len, [*self.switches, ENDLESS])
        found = []
        for position, num_tokens in counts:
            before_end = _num_before_limit(position, limits)
            before_full = _num_before_limit(num_tokens, [self.num_indexed])
            found.append(min(before_end, before_switch, before_full))
        return found


def switch_lengths(config: PreTrainedConfig) -> list[int]:
    """The lengths of text after which rotary positions have other frequencies for all tokens of a forward.

    Those of `longrope` have, and where Phi-MoE scales positions in any way it scales them otherwise there.
    """
    found = []
    for kind in _rope_parameters(config):
        rope_type = kind.get("rope_type") or "default"
        is_rescaled = "long_mscale" in kind and rope_type != "default"
        if rope_type == "longrope" or is_rescaled:
            found.append(kind["original_max_position_embeddings"])
    return found


def scaled_context(config: PreTrainedConfig) -> int | None:
    """The longest text that a model is made for: the positions that its config names, times what scales them."""
    context = _named_context(config)
    if context is None:
        return None

    longest = context
    for kind in _rope_parameters(config):
        factor = kind.get("factor")
        if factor is not None and kind.get("rope_type") != "longrope":  # which names the scaled length itself
            longest = max(longest, int(factor * kind.get("original_max_position_embeddings", context)))
    return longest


def check_prompt(model: PreTrainedModel, prompt_len: int) -> None:
    """Refuse a prompt that is longer than the table of positions of a target: [`GenerationError`]."""
    num_positions = num_tabled(model)
    if prompt_len > num_positions:
        raise GenerationError(
            f"The prompt must fit the target's context of {num_positions} tokens, but it has {prompt_len}. "
            "Shorten it, or load a target with a longer context."
        )


def num_tabled(model: PreTrainedModel) -> int:
    """The positions in the table of a target that looks them up in one; endless for others."""
    context = _named_context(model.config.get_text_config(decoder=True))
    return context if context is not None and _has_table(model) else ENDLESS


def _named_context(config: PreTrainedConfig) -> int | None:
    found = (getattr(config, name, None) for name in _CONTEXTS)
    return next((each for each in found if isinstance(each, int) and each > 0), None)  # -1 is endless (XLNet)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of rotary positions, of all kinds of layers."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]


def changes_with_length(config: PreTrainedConfig) -> bool:
    """Whether rotary frequencies depend on the length of the text, and change with each token."""
    return any("dynamic" in (kind.get("rope_type") or "") for kind in _rope_parameters(config))


@once_a_model
def _has_table(model: PreTrainedModel) -> bool:
    """Whether positions are looked up in a table that ends with the context, learned or computed beforehand."""
    # without rotary positions, and without ids of them, biases are made for so many slots (MPT)
    if hasattr(model.config, "max_seq_len") and "position_ids" not in signature(model.forward).parameters:
        return True

    context = _named_context(model.config.get_text_config(decoder=True)) or 0
    rows = range(context, context + _MOST_EXTRA_ROWS + 1)
    embeddings = model.get_input_embeddings()
    parts = [part for part in decoder_of(model).modules() if part is not embeddings]
    return any(_holds_rows(part, rows) for part in parts)


def _holds_rows(part: nn.Module, rows: range) -> bool:
    if isinstance(part, nn.Embedding):
        return part.num_embeddings in rows
    tables = [table for table in part.buffers(recurse=False) if table.dim() >= _MATRIX]
    return any(size in rows for table in tables for size in table.shape)


def _num_before_limit(position: int, limits: Sequence[int]) -> int:
    """The number of tokens that fit between the one at `position` and the next of `limits`."""
    return min((limit for limit in limits if limit > position), default=position + 1) - 1 - position


@contextmanager
def frequencies_kept(model: nn.Module) -> Iterator[None]:
    """Forwards inside leave no frequencies behind, which may depend on the longest text that was read."""
    parts = [part for part in model.modules() if hasattr(part, "max_seq_len_cached")]
    before = [({**vars(part)}, {**part._buffers}) for part in parts]
    values = [[(buffer, buffer.clone()) for buffer in part.buffers(recurse=False)] for part in parts]

    try:
        yield
    finally:
        for part, (attributes, buffers) in zip(parts, before, strict=True):
            for name in vars(part).keys() - attributes.keys():
                delattr(part, name)
            vars(part).update(attributes)
            part._buffers.update(buffers)

        for buffer, value in chain.from_iterable(values):  # some are overwritten where they lie
            buffer.copy_(value)


def reads_rows_as_alone(model: PreTrainedModel, shortest: int, end: int) -> bool:
    """Whether no limit lets a batch be read or drafted otherwise than its rows alone.

    `shortest` are the tokens of the shortest prompt, `end` those that the longest row may get. `check_batch` takes
    such a batch.
    """
    limits = TextLimits.of_model(model)
    is_limited = end > limits.num_indexed or limits.counts_slots(0, end)
    return not is_limited and not _frequency_changes(model, shortest, end)


def _frequency_changes(model: PreTrainedModel, num_tokens: int, end: int) -> list[int]:
    """The lengths at which rotary frequencies change while a text of so many tokens grows to `end`."""
    limits = TextLimits.of_model(model)
    passed = [switch for switch in limits.switches if num_tokens <= switch < end]
    if changes_with_length(model.config.get_text_config(decoder=True)) and end > limits.num_positions:
        passed.append(limits.num_positions)
    return passed


def check_batch(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> None:
    """Raise an error for a batch of which one row would pass a limit and change what the others read."""
    if len(input_ids) == 1:
        return

    limits = TextLimits.of_model(model)
    mask, end = model_kwargs.get("attention_mask"), longest_text(input_ids, model_kwargs, config)
    if end > limits.num_indexed:
        raise GenerationError(
            f"The rows of a batch may hold at most the {limits.num_indexed} tokens that this target's index keeps "
            f"(`index_topk`), but they may grow to {end}. Call `generate` once for each sequence, or end the texts "
            "before."
        )

    text_len = text_length(input_ids, model_kwargs, config)
    longest = text_len if mask is None else int(mask.sum(-1).max())
    passed = _frequency_changes(model, longest, end)
    if passed:
        raise GenerationError(
            f"This target changes its rotary frequencies at {passed} tokens, which a batch cannot pass row by row: "
            "call `generate` once for each sequence, or end the text before."
        )


def check_switches(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise an error for a text that would pass a length at which this version of Transformers forgets it."""
    if not FORGETS_DROPPED_TEXT:
        return

    text_len = text_length(input_ids, model_kwargs, config)

    for length in switch_lengths(model.config):
        if not text_len <= length < config.max_length:
            continue

        token_ids = input_ids.new_zeros(1, length + 1)
        cache = new_cache(model.config)
        inputs = model.prepare_inputs_for_generation(token_ids, next_sequence_length=1, **{CACHE: cache})
        if inputs.get(CACHE) is None:
            raise GenerationError(
                f"{named(model)} drops its cache at {length} tokens, where Transformers before 5.20 reads only the "
                f"newest token again and forgets the rest, but the text may grow to {config.max_length}. Update "
                "Transformers, or end the text before."
            )


def read_anew(model: Any, token_ids: Tensor, cache: Cache, prompt_kwargs: dict[str, Any], num_new: int) -> Cache:
    """The cache with which plain decoding reads the newest token: a new one where the model drops its own (Phi3)."""
    held: dict[str, Any] = {CACHE: cache}
    outputs = CausalLMOutputWithPast(**held)
    kwargs = {**grown(model, outputs, prompt_kwargs, num_new), **held}
    inputs = model.prepare_inputs_for_generation(token_ids, **kwargs)
    if inputs.get(CACHE) is not None:
        return cache

    inputs[CACHE] = new_cache(model.config)
    model(**inputs, return_dict=True)
    drop_last(inputs[CACHE], 1)
    return inputs[CACHE]
