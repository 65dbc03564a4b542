"""Differences between what was written without and with a drafter, in words; bounds tell rounding from differences."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.trials.call import Call
from tests.trials.written import Written
from transformers_falcon_spec.generation.recurrent import states_of
from transformers_falcon_spec.generation.stock_cache import num_tokens
from transformers_falcon_spec.transformers_versions import CACHE

# How far scores may differ by rounding, for each unit of the largest: a tree is read by other kernels than a token, and norms and
# rotary positions compute in float32 whatever the type.
ROUNDING = {"float64": 1e-5, "float32": 5e-4, "bfloat16": 0.25}
# Tokens that rounding may move across a limit, such as that of `top_p`: one goes, or one takes the place of another. More may go and
# come where all of them are by rounding the last ones that are left, as by `top_k`.
CUT = 2
_LAYERS = ("hidden_states", "attentions")


def differences(call: Call, plain: Written, ours: Written) -> list[str]:
    """All that differs between two runs of one batch; the text alone where that does."""
    if split(call, plain, ours) is not None:
        return [_text_difference(call, plain, ours)]
    return [
        *_process(plain, ours),
        *_heard(call, plain, ours),
        *_score_differences(call, plain, ours, None),
        *_layer_differences(call, plain, ours),
        *_cache_differences(call, plain, ours),
    ]


def row_differences(call: Call, alone: Written, ours: Written, row: int) -> list[str]:
    """What differs between a row that was written alone and the same row of a batch."""
    if split(call, alone, ours, row) is not None:
        return [f"row {row}: " + _text_difference(call, alone, ours, row)]
    return [f"row {row}: {each}" for each in _score_differences(call, alone, ours, row)]


def batch_differences(call: Call, ours: Written) -> list[str]:
    """What cannot be right in a batch, whatever each row holds."""
    found = _streamed(call, ours)
    cache = getattr(ours.output, CACHE, None)
    if cache is not None and num_tokens(cache, num_slots(call, ours)) != num_slots(call, ours):
        found.append(f"the cache holds {num_tokens(cache)} slots, not {num_slots(call, ours)}")
    if cache is not None and ours.cache is not None and cache is not ours.cache:
        found.append("the cache that is returned is not the one that was passed")
    return found


def split(call: Call, plain: Written, ours: Written, row: int | None = None) -> tuple[int, int] | None:
    """Row and column of the first token that differs; a column behind the end where one text is longer."""
    assert plain.text is not None  # neither was refused
    assert ours.text is not None
    texts = list(zip(plain.text, ours.text if row is None else ours.text[row : row + 1], strict=True))
    for number, (one, other) in enumerate(texts):
        length = min(len(one), len(other))
        columns = (one[:length] != other[:length]).nonzero()
        if len(columns):
            return number if row is None else row, int(columns[0])
        rest = one[length:] if len(one) > length else other[length:]
        is_free = row is not None and len(other) > length and not _ends(call) and call.extras  # grows with the others
        is_padding = row is not None and _ends(call) and bool((rest == _pad(call)).all())
        if len(rest) and not (is_free or is_padding):
            return number if row is None else row, length
    return None


def open_steps(call: Call, text: Tensor) -> int:
    """Tokens that a row `[tokens]` got before it was padded, as complete rows are where there is an end token."""
    new = text[prompt_len(call) :].tolist()
    while _ends(call) and new and new[-1] == _pad(call):
        new.pop()
    return len(new)


def prompt_len(call: Call) -> int:
    """Tokens of the prompts that were passed."""
    return max(call.lengths) - (call.num_cached if call.cache == "new" else 0)


def num_slots(call: Call, ours: Written) -> int:
    """Tokens that a cache holds after the call: all but the newest."""
    assert ours.text is not None
    return ours.text.shape[1] - 1 + (call.num_cached if call.cache == "new" else 0)


def are_close(one: Tensor, other: Tensor, dtype: str, num_cut: int = 0) -> bool:
    """Whether rounding explains the difference; all but `num_cut` infinities must stand at the same tokens, or be next to the limit."""
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    cut = one.isinf() | other.isinf()
    largest = one.masked_fill(cut, 0).abs().amax() if one.numel() else 0.0
    rounding = ROUNDING[dtype] * max(1.0, float(largest))
    num_moved = int((one.isinf() != other.isinf()).sum())
    are_last = _are_last(one, other, rounding) and _are_last(other, one, rounding)
    if num_moved > num_cut and not (num_cut and are_last):
        return False
    return bool(((one - other).masked_fill(cut, 0).abs() <= rounding).all())


def _are_last(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether the tokens that `other` cut and `one` left are the lowest ones of `one`."""
    left, moved = one[~one.isinf()], one[~one.isinf() & other.isinf()]
    return not moved.numel() or bool((moved <= left.min() + rounding).all())


def _process(plain: Written, ours: Written) -> list[str]:
    same = torch.equal(plain.state, ours.state)
    return [] if same else ["the global random state differs after the call"]


def _heard(call: Call, plain: Written, ours: Written) -> Iterator[str]:
    """What streamers and criteria were given."""
    yield from _streamed(call, ours)
    if plain.streamer and ours.streamer and plain.streamer.chunks != ours.streamer.chunks:
        yield f"the streamer got {ours.streamer.chunks}, not {plain.streamer.chunks}"
    if plain.spy and ours.spy and len(call.lengths) == 1 and plain.spy.seen != ours.spy.seen:
        yield f"the criterion saw {len(ours.spy.seen)} texts that are not the {len(plain.spy.seen)} of plain decoding"


def _streamed(call: Call, ours: Written) -> list[str]:
    if ours.streamer is None or ours.text is None:
        return []
    start = prompt_len(call)
    expected = [ours.text[:, :start].flatten().tolist(), *ours.text[:, start:].T.tolist()]
    if ours.streamer.chunks != expected or ours.streamer.num_ends != 1:
        return [
            f"the streamer got {ours.streamer.chunks} and {ours.streamer.num_ends} ends, but the text is {expected}"
        ]
    return []


def _score_differences(call: Call, plain: Written, ours: Written, row: int | None) -> Iterator[str]:
    for name in ("scores", "logits"):
        one, other = getattr(plain.output, name, None), getattr(ours.output, name, None)
        if one is None and other is None:
            continue
        if one is None or other is None or (len(one) > len(other) if row is not None else len(one) != len(other)):
            yield f"`{name}` of {_length(other)} steps, not of {_length(one)}"
            continue
        yield from _step_differences(call, plain, name, one, other, row)


def _step_differences(call: Call, plain: Written, name: str, one: Any, other: Any, row: int | None) -> Iterator[str]:
    assert plain.text is not None
    for number, text in enumerate(plain.text):
        mine = number if row is None else row
        for step in range(open_steps(call, text)):
            if not are_close(one[step][number], other[step][mine], call.dtype, CUT if name == "scores" else 0):
                largest = (one[step][number].double() - other[step][mine].double()).nan_to_num(0, 0, 0).abs().amax()
                yield f"`{name}` of row {mine} differ at step {step} by {float(largest):.2g}"
                return


def _layer_differences(call: Call, plain: Written, ours: Written) -> Iterator[str]:
    """Of one row that is not padded everything must be equal, of others how many there are and their shapes."""
    for name in _LAYERS:
        one, other = getattr(plain.output, name, None), getattr(ours.output, name, None)
        if (one is None) != (other is None):
            yield f"`{name}` are {'missing' if other is None else 'there, though not in plain decoding'}"
        if one is None or other is None:
            continue
        shapes = [
            [[None if each is None else tuple(each.shape) for each in step] for step in steps]
            for steps in (one, other)
        ]
        if shapes[0] != shapes[1]:
            yield f"`{name}` have the shapes {shapes[1]}, not {shapes[0]}"
        elif not _is_padded_batch(call):
            pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
            if not all(left is None or are_close(left, right, call.dtype) for left, right in pairs):
                yield f"`{name}` differ"


def _cache_differences(call: Call, plain: Written, ours: Written) -> Iterator[str]:
    one = getattr(plain.output, CACHE, plain.cache)
    other = getattr(ours.output, CACHE, ours.cache)
    if ours.cache is not None and (other is ours.cache) != (one is plain.cache):  # Phi3 drops it at a switch
        yield "the cache that is returned is another one than in plain decoding"
    if one is None or other is None:
        return
    if num_tokens(one) != num_tokens(other):
        yield f"the cache holds {num_tokens(other)} slots, not {num_tokens(one)}"
        return
    found = [_slot_difference(call, *layers) for layers in zip(one.layers, other.layers, strict=True)]
    yield from (f"layer {number} of the cache {what}" for number, what in enumerate(found) if what)


def _slot_difference(call: Call, one: Any, other: Any) -> str | None:
    """What differs between two layers of caches."""
    habits = [(getattr(layer, "record_past", False), getattr(layer, "sliding_window", None)) for layer in (one, other)]
    if habits[0] != habits[1]:
        return f"records and slides by {habits[1]}, not by {habits[0]}"
    pairs = zip(states_of(one).values(), states_of(other).values(), strict=True)
    if not _is_padded_batch(call) and not all(are_close(*pair, call.dtype) for pair in pairs):
        return "holds other recurrent states"
    left, right = getattr(one, "keys", None), getattr(other, "keys", None)
    if left is None or right is None:
        return None
    if left.shape != right.shape:
        return f"has the shape {tuple(right.shape)}, not {tuple(left.shape)}"
    has_equal_keys = _is_padded_batch(call) or are_close(left, right, call.dtype)
    return None if has_equal_keys else "holds other keys"


def _text_difference(call: Call, plain: Written, ours: Written, row: int | None = None) -> str:
    where = split(call, plain, ours, row)
    assert where is not None
    assert plain.text is not None
    assert ours.text is not None
    start = prompt_len(call)
    texts = plain.text[0 if row is not None else where[0], start:], ours.text[where[0], start:]
    return (
        f"the text of row {where[0]} differs at token {where[1] - start}: {texts[1].tolist()}, not {texts[0].tolist()}"
    )


def _is_padded_batch(call: Call) -> bool:
    """Whether rows hold what nobody reads: padding, or what came after their end."""
    return call.is_padded or len(call.lengths) > 1


def _ends(call: Call) -> list[int]:
    return call.decoding.get("eos_token_id", [])


def _pad(call: Call) -> int:
    return call.decoding.get("pad_token_id", 0)


def _length(steps: Any) -> int:
    return 0 if steps is None else len(steps)
