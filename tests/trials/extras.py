"""What a call may bring beside plain options: processors, criteria and arguments of the model, each made anew for every call."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from tests.families import VOCAB_SIZE


class ListStreamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.num_ends = 0

    def put(self, value: Tensor) -> None:
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.num_ends += 1


class Spy(StoppingCriteria):
    """Keeps what it is shown, and stops nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], int | None]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.zeros(len(input_ids), dtype=torch.bool)


class StopsAt(StoppingCriteria):
    """Stops each row at its first token that divides evenly; none is an end token, so that no row is padded."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 13 == 5


class StopsAtLength(StoppingCriteria):
    """Stops all rows at a length."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 24)


class Counts(LogitsProcessor):
    """Forbids tokens that depend on how often it was asked: a state for each row."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        return scores.index_fill(1, torch.arange(self.num_calls % 5, VOCAB_SIZE, 5), -torch.inf)


class WritesInPlace(LogitsProcessor):
    """Changes the scores that it is given, by the newest token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            scores[row, (token + 1) % 7 :: 7] -= 3
        return scores


class LooksFarBack(LogitsProcessor):
    """A function of the whole text: the sum of it forbids some tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        is_forbidden = torch.arange(VOCAB_SIZE)[None] % 9 == input_ids.sum(-1, keepdim=True) % 9
        return scores.masked_fill(is_forbidden, -torch.inf)


def _other_parity(_row: int, text: Tensor) -> list[int]:
    return list(range(int(text[-1] + 1) % 2 + 2, VOCAB_SIZE, 2))


@lru_cache(maxsize=1)
def _tokenizer() -> PreTrainedTokenizerFast:
    """One that knows a character for each token."""
    tokenizer = Tokenizer(BPE({chr(33 + token): token for token in range(VOCAB_SIZE)}, []))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _rows(num_rows: int, *values: float) -> Tensor:
    return torch.tensor([values[row % len(values)] for row in range(num_rows)])[:, None]


PROCESSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "counts": lambda: {"logits_processor": LogitsProcessorList([Counts()])},
    "writes in place": lambda: {"logits_processor": LogitsProcessorList([WritesInPlace()])},
    "looks far back": lambda: {"logits_processor": LogitsProcessorList([LooksFarBack()])},
    "other parity": lambda: {"prefix_allowed_tokens_fn": _other_parity},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "watermark of the newest": lambda: {
        "watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")
    },
    "synth id": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, sampling_table_size=64)
    },
}
MAY_REMEMBER = ("counts", "writes in place", "looks far back", "synth id")  # or cannot be known not to
CRITERIA: dict[str, Callable[[], dict[str, Any]]] = {
    "stops at": lambda: {"stopping_criteria": StoppingCriteriaList([StopsAt()])},
    "stops at length": lambda: {"stopping_criteria": StoppingCriteriaList([StopsAtLength()])},
    "spy": lambda: {"stopping_criteria": StoppingCriteriaList([Spy()])},
    "stop strings": lambda: {"stop_strings": ["a", "k", "F", "Zz"], "tokenizer": _tokenizer()},
}
OF_BATCHES = ("stops at", "stops at length", "spy")  # criteria that are not Transformers' own
# By the prompts `[rows, tokens]` and their mask.
ARGUMENTS: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "tilt": lambda ids, mask: {"tilt": _rows(len(ids), 1.5, -1.0, 0.5)},
    "token types": lambda ids, mask: {"token_type_ids": _rows(len(ids), 1, 5, 2).long().expand(ids.shape).clone()},
    "token types that differ": lambda ids, mask: {"token_type_ids": ids % 7},
    "positions": lambda ids, mask: {"position_ids": 2 * torch.arange(ids.shape[1]).repeat(len(ids), 1) + 3},
    "shared positions": lambda ids, mask: {"position_ids": torch.arange(ids.shape[1])[None] + 5},
    "positions by mask": lambda ids, mask: {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
}
