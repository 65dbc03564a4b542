"""The inputs of the target for the nodes of a draft, derived from those of plain decoding for one new token."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from ..errors import GenerationError
from ..transformers_versions import CACHE, CHUNKS_READ_CACHED_TOKENS_AGAIN
from .recurrent import StatesAside
from .stock_cache import drop_last, num_tokens

# Inputs that the loop sets, or leaves out, since all nodes need logits and masks say what each one sees.
OWN = {
    *("input_ids", CACHE, "use_cache", "attention_mask", "position_ids", "cache_position"),
    *("return_dict", "output_hidden_states", "output_attentions", "output_router_logits"),
    *("logits_to_keep", "is_causal"),
}
_MOST_STEPS = 3  # one may drop the cache, two are compared
_MATRIX = 2  # dimensions of rows and tokens


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a decoding step, apart from tokens, cache and mask."""

    position_ids: Tensor  # [rows, 1] or [axes, rows, 1], of the next token; one more at each step
    constant: dict[str, Any] = field(default_factory=dict)  # the same at every step
    by_token: dict[str, Tensor] = field(default_factory=dict)  # one entry for each new token, all alike
    by_text: dict[str, Tensor] = field(default_factory=dict)  # one for each token; later ones equal the last
    has_position_ids: bool = False  # whether the model prepares `position_ids`
    has_cache_position: bool = False  # whether it prepares `cache_position`
    has_mask: bool = True  # whether it prepares the mask of a padded text; recurrent layers need none behind it

    def of_nodes(self, num_rows: int, num_nodes: int, positions: Tensor) -> dict[str, Any]:
        """The inputs for nodes that follow a text whose tokens have these positions `[rows, slots]` in the cache."""
        inputs = dict(self.constant)
        for name, value in self.by_token.items():
            inputs[name] = _repeated(value.expand(*value.shape[:-1], num_nodes), num_rows)

        for name, value in self.by_text.items():
            last = value.shape[-1] - 1
            index = functional.pad(positions.clamp(0, last), (0, num_nodes), value=last).to(value.device)
            if len(index) == 1:
                inputs[name] = _repeated(value.index_select(-1, index[0]), num_rows)
            else:
                inputs[name] = value.expand(len(index), -1).gather(-1, index)

        if self.has_cache_position:
            num_slots = positions.shape[1]
            inputs["cache_position"] = torch.arange(num_slots, num_slots + num_nodes, device=positions.device)
        return inputs

    def can_select(self, num_rows: int) -> bool:
        """Whether it is known which part of every input is whose, so that rows can be selected."""
        others = {name: value for name, value in self.constant.items() if not _has_entry_by_row(value, num_rows)}
        by_row = all(value.dim() == _MATRIX and len(value) in (1, num_rows) for value in self.by_token.values())
        lists = [value for value in others.values() if isinstance(value, list | tuple)]
        is_shared = all(tensor.numel() == 1 for tensor in tensors_in(others))
        return by_row and is_shared and all(len(value) != num_rows for value in lists)

    def of_rows(self, rows: Tensor) -> "StepInputs":
        """The inputs of these rows alone."""
        num_rows = self.position_ids.shape[-2]

        def selected(inputs: dict[str, Any]) -> dict[str, Any]:
            return {
                name: value[rows.to(value.device)] if _has_entry_by_row(value, num_rows) else value
                for name, value in inputs.items()
            }

        return replace(
            self,
            position_ids=self.position_ids.index_select(-2, rows.to(self.position_ids.device)),
            constant=selected(self.constant),
            by_token=selected(self.by_token),
            by_text=selected(self.by_text),
        )


def _has_entry_by_row(value: Any, num_rows: int) -> TypeGuard[Tensor]:
    """Whether an input has an entry for each row, as `generate` also reads tensors of that shape."""
    return isinstance(value, Tensor) and value.dim() >= _MATRIX and len(value) == num_rows


@dataclass(frozen=True)
class _Step:
    number: int
    model_kwargs: dict[str, Any]  # as `generate` keeps them for later steps
    inputs: dict[str, Any]  # of the model's forward


class _LongerCache:
    def __init__(self, cache: Any, num_more: int) -> None:
        self._cache, self._num_more = cache, num_more

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens in the cache, the additional ones included."""
        return int(self._cache.get_seq_length(*args, **kwargs)) + self._num_more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def grown(model: Any, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int = 1) -> dict[str, Any]:
    """The keyword arguments after `num_tokens` more tokens, updated token by token as `generate` updates them."""
    for _ in range(num_tokens):
        model_kwargs = model._update_model_kwargs_for_generation(
            outputs, dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
        )
    return model_kwargs


def text_length(input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> int:
    """The number of tokens of the prompt, those in a filled cache included, whose ids may not be among `input_ids`."""
    mask = model_kwargs.get("attention_mask")
    length: int = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return max(length, input_ids.shape[1])


def longest_text(input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> int:
    """The most tokens of the whole text, where `max_length` counts no more of the prompt than `input_ids`."""
    return config.max_length + text_length(input_ids, model_kwargs, config) - input_ids.shape[1]


def check_chunks(input_ids: Tensor, num_cached: int, model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise an error where this version of Transformers would read tokens that the cache holds once more."""
    if not CHUNKS_READ_CACHED_TOKENS_AGAIN or config.prefill_chunk_size is None:
        return

    holds_whole_text = text_length(input_ids, model_kwargs, config) == input_ids.shape[1]
    if num_cached and holds_whole_text:
        raise GenerationError(
            "With `prefill_chunk_size`, Transformers before 5.23 reads tokens that the cache holds once more: it has "
            f"{num_cached} of the {input_ids.shape[1]} in `input_ids`. Leave `prefill_chunk_size` out, pass only the "
            "tokens that the cache lacks, or update Transformers."
        )


def step_inputs(model: Any, input_ids: Tensor, cache: Any, model_kwargs: dict[str, Any], outputs: Any) -> StepInputs:
    """The inputs of the steps after a prefill, found by comparing two steps that plain decoding would make."""
    first, second = islice(_steps(model, input_ids, cache, model_kwargs, outputs), 2)
    length = num_tokens(cache, input_ids.shape[1])
    found = StepInputs(
        _position_ids(first, second, outputs.logits, length),
        has_position_ids=isinstance(first.inputs.get("position_ids"), Tensor),
        has_cache_position=isinstance(first.inputs.get("cache_position"), Tensor),
        has_mask=_has_mask(model, first, model_kwargs.get("attention_mask")),
    )
    value: Any
    later: Any
    doubtful = []
    for name in sorted({*first.inputs, *second.inputs} - OWN):
        value, later = first.inputs.get(name), second.inputs.get(name)
        if _has_entry_by_token(value, later, *(length + step.number for step in (first, second))):
            _check_rows(name, value, len(input_ids))
            found.by_text[name] = value
            continue

        _check_same(name, value, later)
        has_one_entry = isinstance(value, Tensor) and value.shape[-1:] == (1,)
        if has_one_entry and not _is_one_value(name, value, first, model_kwargs, input_ids):
            found.by_token[name] = value
        else:
            found.constant[name] = value
            doubtful += [name] if any(tensor.shape[-1:] not in ((), (1,)) for tensor in tensors_in(value)) else []

    _drop_unread(model, cache, first, found.constant, doubtful)
    return found


def _steps(model: Any, input_ids: Tensor, cache: Any, model_kwargs: dict[str, Any], outputs: Any) -> Iterator[_Step]:
    """The next steps of plain decoding that go on with the cache; Phi3 may drop it in one."""
    ids, vocab_size = input_ids, model.config.get_text_config(decoder=True).vocab_size
    for number in range(1, _MOST_STEPS + 1):
        model_kwargs = grown(model, outputs, model_kwargs)
        ids = torch.cat([ids, (ids[:, -1:] + 1) % vocab_size], dim=-1)  # other tokens, should inputs depend on them
        kwargs = {**model_kwargs, CACHE: _LongerCache(cache, number - 1)}
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        if inputs.get(CACHE) is not None:
            yield _Step(number, dict(model_kwargs), {name: _copied(value) for name, value in inputs.items()})


def _position_ids(first: _Step, second: _Step, logits: Tensor, length: int) -> Tensor:
    position, later = first.inputs.get("position_ids"), second.inputs.get("position_ids")
    rows = logits.shape[0]
    if position is None or later is None:
        return torch.full((rows, 1), length, device=logits.device)

    position, later = position[..., -1:], later[..., -1:]
    if not torch.equal(position + second.number - first.number, later):
        raise GenerationError(
            f"`position_ids` must grow by one with each token, but they are {position.flatten().tolist()} at step "
            f"{first.number} and {later.flatten().tolist()} at step {second.number}. Generate without "
            "`assistant_model`."
        )

    return position.expand(*position.shape[:-2], rows, 1) - (first.number - 1)


def _has_mask(model: Any, step: _Step, mask: Any) -> bool:
    """Whether a step has a mask; an error if that is not the prompt's with new tokens: tree masks are made of it."""
    prepared = step.inputs.get("attention_mask")
    if prepared is None and (mask is None or model._is_stateful):
        return False

    shape = tuple(prepared.shape) if isinstance(prepared, Tensor) else type(prepared).__name__
    if isinstance(prepared, Tensor) and prepared.dim() == _MATRIX:
        expected = torch.ones_like(prepared) if mask is None else functional.pad(mask, (0, step.number), value=1)
        if is_same(expected != 0, prepared != 0):
            return True

    raise GenerationError(
        "`attention_mask` must say of every token whether it is padding, as that of the prompt does, but the target "
        f"makes another one of it for its next step: {shape}. Generate without `assistant_model`."
    )


def _has_entry_by_token(value: Any, later: Any, num_tokens: int, num_later: int) -> TypeGuard[Tensor]:
    """Whether an input has one entry for each token of the text, and later steps repeat the last one."""
    if not isinstance(value, Tensor) or not isinstance(later, Tensor):
        return False
    if (value.shape[-1:], later.shape[-1:]) != ((num_tokens,), (num_later,)):
        return False
    return is_same(later[..., :num_tokens], value) and bool((later[..., num_tokens:] == value[..., -1:]).all())


def _is_one_value(name: str, value: Tensor, step: _Step, prompt_kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether a single entry is for the whole text and not for one token."""
    is_given = all(is_same(kwargs.get(name), value) for kwargs in (prompt_kwargs, step.model_kwargs))
    return is_given and (input_ids.shape[1] > 1 or value.shape != input_ids.shape)


def _check_rows(name: str, value: Tensor, num_rows: int) -> None:
    if num_rows > 1 and (value.dim() != _MATRIX or len(value) not in (1, num_rows)):
        raise GenerationError(
            f"`{name}` must be of shape [rows, tokens] in a batch, whose rows go on at their own pace, but it is "
            f"{tuple(value.shape)}. Call `generate` once for each sequence."
        )


def _check_same(name: str, value: Any, later: Any) -> None:
    if not is_same(value, later):
        one, other = (
            f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"{each!r:.60}"
            for each in (value, later)
        )
        raise GenerationError(
            f"`{name}` must be the same at every step, for a draft is read as several steps in one, but a step gets "
            f"{one} and the next one {other}. Generate without `assistant_model`."
        )


def _drop_unread(model: Any, cache: Any, step: _Step, constant: dict[str, Any], doubtful: list[str]) -> None:
    """Remove `doubtful` inputs if no step reads them, as sizes of images; else raise an error, as they may be cut."""
    if not doubtful:
        return

    inputs = {**step.inputs, CACHE: cache}
    logits = _next_logits(model, cache, inputs)
    noise = (_next_logits(model, cache, inputs) - logits).abs().max()  # of kernels that add in no fixed order

    for name in doubtful:
        without = {other: value for other, value in inputs.items() if other != name}
        try:
            is_read = bool((_next_logits(model, cache, without) - logits).abs().max() > noise)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
            is_read = True  # it is needed

        if is_read:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors_in(constant[name]))
            raise GenerationError(
                f"`{name}` must be one value, or have in its last dimension an entry for each new token or for each "
                "token of the growing text, so that it can be extended to the nodes of a draft, but every step reads "
                f"one of shape {shapes}. Generate without `assistant_model`."
            )

        inputs = without
        del constant[name]


def _next_logits(model: Any, cache: Any, inputs: dict[str, Any]) -> Tensor:
    num_slots, states = num_tokens(cache), StatesAside(cache)
    try:
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
    finally:
        drop_last(cache, num_tokens(cache) - num_slots)
        states.put_back()
    return logits.float()


def _repeated(value: Tensor, num_rows: int) -> Tensor:
    if num_rows > 1 and value.dim() >= _MATRIX and len(value) == 1:
        return value.expand(num_rows, *value.shape[1:])
    return value


def is_same(one: Any, other: Any) -> bool:
    """Whether two inputs are equal, down to the tensors in them."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))

    if isinstance(one, dict):
        one, other = list(one.items()), list(other.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))

    return bool(one == other)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list) else value


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]
