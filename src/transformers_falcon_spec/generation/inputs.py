"""The inputs that plain decoding would give the target at its next steps, extended from one new token to the nodes of a draft."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import GenerationError
from .arguments import described, is_same, is_vector, snapshot, tensors_in
from .cache import drop_last

# What the loop sets itself, and what means nothing to one token: all nodes need logits, and masks say what each one sees.
OWN = frozenset({"input_ids", "past_key_values", "use_cache", "attention_mask", "position_ids", "cache_position"})
OWN |= {"return_dict", "output_hidden_states", "output_attentions", "output_router_logits"}
OWN |= {"logits_to_keep", "is_causal"}
_MOST_STEPS = 3  # one may drop the cache, two are compared
_MATRIX = 2  # dimensions of rows and tokens


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a decoding step, apart from tokens, cache and mask.

    Args:
        positions (`torch.Tensor` of shape `(rows, 1)` or `(axes, rows, 1)`): Of the next token; one more at each step.
        constant (`dict`): What every step gets as it is.
        by_token (`dict[str, torch.Tensor]`): What holds one entry for each new token, in the last dimension; all alike.
        by_text (`dict[str, torch.Tensor]`): What holds one entry for each token of the text and the next one; later ones are alike.
        has_positions (`bool`): Whether the target is told them.
        counts_slots (`bool`): Whether it is told in which slots of the cache its tokens stand.
    """

    positions: Tensor
    constant: dict[str, Any] = field(default_factory=dict)
    by_token: dict[str, Tensor] = field(default_factory=dict)
    by_text: dict[str, Tensor] = field(default_factory=dict)
    has_positions: bool = False
    counts_slots: bool = False

    def of_nodes(self, num_rows: int, num_nodes: int, places: Tensor) -> dict[str, Any]:
        """The inputs for nodes behind slots that hold the tokens of `places` `[rows, slots]`."""
        inputs = dict(self.constant)
        for name, value in self.by_token.items():
            inputs[name] = _in_rows(value.expand(*value.shape[:-1], num_nodes), num_rows)
        for name, value in self.by_text.items():
            last = value.shape[-1] - 1
            index = torch.nn.functional.pad(places.clamp(0, last), (0, num_nodes), value=last).to(value.device)
            if len(index) == 1:
                inputs[name] = _in_rows(value.index_select(-1, index[0]), num_rows)
            else:
                inputs[name] = value.expand(len(index), -1).gather(-1, index)
        if self.counts_slots:
            num_slots = places.shape[1]
            inputs["cache_position"] = torch.arange(num_slots, num_slots + num_nodes, device=places.device)
        return inputs


@dataclass(frozen=True)
class _Step:
    """One coming step of plain decoding: the arguments kept for later steps, and the inputs that the model would get."""

    number: int
    kept: dict[str, Any]
    inputs: dict[str, Any]


class _Longer:
    """A view of a cache whose length says that it has read a few tokens more."""

    def __init__(self, cache: Any, num_more: int) -> None:
        self._cache, self._num_more = cache, num_more

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens read, the coming ones included."""
        return int(self._cache.get_seq_length(*args, **kwargs)) + self._num_more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def grown(model: Any, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int = 1) -> dict[str, Any]:
    """The kwargs of a call after `num_tokens` more tokens, as plain decoding grows them: one by one."""
    for _ in range(num_tokens):
        model_kwargs = model._update_model_kwargs_for_generation(
            outputs, dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
        )
    return model_kwargs


def grown_to(model: Any, cache: Any, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The same as [`grown`], for callers that no longer have the outputs."""
    return grown(model, CausalLMOutputWithPast(past_key_values=cache), model_kwargs, num_tokens)


def text_length(input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> int:
    """Tokens of the prompt; a filled cache may hold some whose ids are not among `input_ids`."""
    mask = model_kwargs.get("attention_mask")
    length: int = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return max(length, input_ids.shape[1])


def check_can_be_repeated(model_kwargs: dict[str, Any]) -> None:
    """Raise an error for arguments that every step would use up.

    Raises:
        [`GenerationError`]: an argument is an iterator.
    """
    for name, value in model_kwargs.items():
        if isinstance(value, Iterator):
            raise GenerationError(
                f"`{name}` must be the same at every step, but it is a {type(value).__name__}, which gives every step something else. "
                "Generate without `assistant_model`."
            )


def step_inputs(model: Any, input_ids: Tensor, cache: Any, model_kwargs: dict[str, Any], outputs: Any) -> StepInputs:
    """The inputs of the steps after a prefill.

    Args:
        model ([`~transformers.PreTrainedModel`]): The target.
        input_ids (`torch.Tensor` of shape `(rows, tokens)`): The ids of the call.
        cache ([`~transformers.Cache`]): It holds the prompt.
        model_kwargs (`dict`): What the prefill got.
        outputs (`Any`): What it gave.

    Raises:
        [`GenerationError`]: an input, named, that one forward over many tokens cannot be given as steps of one token are.
    """
    steps = _steps(model, input_ids, cache, model_kwargs, outputs)
    first, second = (step for step in steps if step.inputs.get("past_key_values") is not None)
    _check_mask(first, model_kwargs.get("attention_mask"))
    constant: dict[str, Any] = {}
    by_token: dict[str, Tensor] = {}
    by_text: dict[str, Tensor] = {}
    doubtful = []
    for name in sorted({*first.inputs, *second.inputs} - OWN):
        value, later = (step.inputs.get(name) for step in (first, second))
        if _grows(value, later, *(cache.get_seq_length() + step.number for step in (first, second))):
            by_text[name] = _of_text(name, value, len(input_ids))
            continue
        _check_same(name, value, later)
        if (
            is_vector(value)
            and value.shape[-1] == 1
            and not _is_one_value(name, value, first, model_kwargs, input_ids)
        ):
            by_token[name] = value
        else:
            constant[name] = value
            doubtful += [name] if any(tensor.shape[-1:] not in ((), (1,)) for tensor in tensors_in(value)) else []
    _drop_unread(model, cache, first, constant, doubtful)
    told = (isinstance(first.inputs.get(name), Tensor) for name in ("position_ids", "cache_position"))
    return StepInputs(_positions(first, second, outputs.logits, cache), constant, by_token, by_text, *told)


def _steps(model: Any, input_ids: Tensor, cache: Any, model_kwargs: dict[str, Any], outputs: Any) -> Iterator[_Step]:
    """Two coming steps that go on with the cache; a step that drops it (Phi3) is there as well."""
    kept, num_found = model_kwargs, 0
    ids, vocab_size = input_ids, model.config.get_text_config(decoder=True).vocab_size
    for number in range(1, _MOST_STEPS + 1):
        kept = grown(model, outputs, kept)
        ids = torch.cat([ids, (ids[:, -1:] + 1) % vocab_size], dim=-1)  # other tokens, should inputs depend on them
        seen = {**kept, "past_key_values": _Longer(cache, number - 1)}
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **seen)
        yield _Step(number, dict(kept), {name: snapshot(value) for name, value in inputs.items()})
        num_found += inputs.get("past_key_values") is not None
        if num_found == 2:  # noqa: PLR2004  two are compared
            return


def _positions(first: _Step, second: _Step, logits: Tensor, cache: Any) -> Tensor:
    """The positions of the first token after the prompt."""
    position, later = (step.inputs.get("position_ids") for step in (first, second))
    rows = logits.shape[0]
    if position is None or later is None:
        return torch.full((rows, 1), cache.get_seq_length(), device=logits.device)
    position, later = position[..., -1:], later[..., -1:]
    if not torch.equal(position + second.number - first.number, later):
        raise GenerationError(
            f"`position_ids` must grow by one with each token, but they are {position.flatten().tolist()} at step {first.number} and "
            f"{later.flatten().tolist()} at step {second.number}. Generate without `assistant_model`."
        )
    return position.expand(*position.shape[:-2], rows, 1) - (first.number - 1)


def _check_mask(step: _Step, mask: Any) -> None:
    """The mask of a step must be that of the prompt and its new tokens, for that is what trees are read with."""
    found = step.inputs.get("attention_mask")
    if found is None and mask is None:
        return
    if not isinstance(found, Tensor) or found.dim() != _MATRIX:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        wanted = False
    else:
        held = torch.ones_like(found) if mask is None else torch.nn.functional.pad(mask, (0, step.number), value=1)
        shape, wanted = tuple(found.shape), held.shape == found.shape and torch.equal(held != 0, found != 0)
    if not wanted:
        raise GenerationError(
            f"`attention_mask` must say of every token whether it is padding, as that of the prompt does, but the target makes another "
            f"one of it for its next step: {shape}. Generate without `assistant_model`."
        )


def _grows(value: Any, later: Any, num_tokens: int, num_later: int) -> TypeGuard[Tensor]:
    """Whether an input holds an entry for each of `num_tokens` tokens, and that of a later step some like the last more."""
    if not is_vector(value) or not is_vector(later) or (value.shape[-1], later.shape[-1]) != (num_tokens, num_later):
        return False
    return is_same(later[..., :num_tokens], value) and bool((later[..., num_tokens:] == value[..., -1:]).all())


def _is_one_value(name: str, value: Tensor, step: _Step, prompt_kwargs: dict[str, Any], input_ids: Tensor) -> bool:
    """Whether the whole prompt got this one entry, too, and not one for each token; a prompt of one token tells by its shape."""
    is_given = all(is_same(kwargs.get(name), value) for kwargs in (prompt_kwargs, step.kept))
    return is_given and (input_ids.shape[1] > 1 or value.shape != input_ids.shape)


def _of_text(name: str, value: Tensor, num_rows: int) -> Tensor:
    if num_rows > 1 and (value.dim() != _MATRIX or len(value) not in (1, num_rows)):
        raise GenerationError(
            f"`{name}` must be of shape [rows, tokens] in a batch, whose rows go on at their own pace, but it is {tuple(value.shape)}. "
            "Call `generate` once for each prompt."
        )
    return value


def _check_same(name: str, value: Any, later: Any) -> None:
    """An input must not change from step to step, for a draft is read in one."""
    if not is_same(value, later):
        raise GenerationError(
            f"`{name}` must be the same at every step, for a draft is read as several steps in one, but a step gets "
            f"{described(value)} and the next one {described(later)}. Generate without `assistant_model`."
        )


def _drop_unread(model: Any, cache: Any, step: _Step, constant: dict[str, Any], doubtful: list[str]) -> None:
    """Take out of `constant` what steps do not read, as the sizes of images that the prefill has read; refuse the rest of `doubtful`.

    A tensor that is neither one value nor one of tokens could be cut or indexed by the tokens of a forward.
    """
    if not doubtful:
        return
    inputs = {**step.inputs, "past_key_values": cache}
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
                f"`{name}` must be one value, or have in its last dimension an entry for each new token or for each token of the growing "
                f"text, so that it can be extended to the nodes of a draft, but every step reads one of shape {shapes}. Generate "
                "without `assistant_model`."
            )
        inputs = without
        del constant[name]


def _next_logits(model: Any, cache: Any, inputs: dict[str, Any]) -> Tensor:
    """The target's logits after one more token, which is dropped from the cache again."""
    num_slots = cache.get_seq_length()
    try:
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
    finally:
        drop_last(cache, cache.get_seq_length() - num_slots)
    return logits.float()


def _in_rows(value: Tensor, num_rows: int) -> Tensor:
    """An input of one row for each of several rows that go on from it."""
    if num_rows > 1 and value.dim() >= _MATRIX and len(value) == 1:
        return value.expand(num_rows, *value.shape[1:])
    return value
