"""Logits processors in tensors of fixed shape: what they do to a token's scores, with nothing asked of the host."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from ..processors import of_row


class DeviceScoring:
    """The processors of a batch as work of fixed shape, and what they must know of each row's text.

    `reset` takes the texts. A step is then `begin`, in every depth of its walk `score` and `add`, and `end`; until
    `end` the texts are as they were. All but `reset` may be captured. [`obstacle_to`] says of which
    processors it can be made.
    """

    @torch.inference_mode(False)  # a later call may write to the buffers outside of it
    def __init__(self, processors: LogitsProcessorList, num_rows: int, vocab_size: int, device: torch.device) -> None:
        zeros = torch.zeros(1, vocab_size, dtype=torch.float, device=device)
        self._lengths = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self._stages = [_STAGES[type(each)](each, zeros, self._lengths) for each in processors]
        self._penalties = [stage for stage in self._stages if isinstance(stage, _Penalty)]
        self._working = (self._lengths, *(penalty.seen for penalty in self._penalties))
        #: What the work changes by what it holds: lengths `[rows, 1]` and tokens seen `[rows, vocab]`.
        self.state = tuple(tensor.clone() for tensor in self._working)

    @property
    def sees_text(self) -> bool:
        """Whether scores depend on the text before, or on the row."""
        return any(type(stage) not in {_Stage, _Bias} for stage in self._stages)

    def fits(self, processors: LogitsProcessorList) -> bool:
        """Whether this work, captured or not, does what these processors do once it is `reset`."""
        mine = [stage.settings for stage in self._stages]
        is_possible = obstacle_to(processors, len(self._lengths)) is None
        return is_possible and mine == [_STAGES[type(each)].settings_of(each) for each in processors]

    def reset(self, processors: LogitsProcessorList, texts: Sequence[Tensor]) -> None:
        """Take processors that fit, and each row's text `[1, tokens]` with its padding, as plain decoding shows it."""
        copies = zip(*(of_row(processors, row, len(texts)) for row in range(len(texts))), strict=True)
        for stage, of_rows in zip(self._stages, copies, strict=True):
            stage.reset(of_rows)
        lengths, *seen = self.state
        for row, text in enumerate(texts):
            lengths[row] = text.shape[1]
            for penalty, tokens in zip(self._penalties, seen, strict=True):
                _mark(tokens[row : row + 1], text[:, int(penalty.starts[row]) :])

    def begin(self) -> None:
        """Begin a walk at the end of each text."""
        for working, kept in zip(self._working, self.state, strict=True):
            working.copy_(kept)

    def score(self, raw: Tensor) -> Tensor:
        """Process scores `[rows, vocab]` of the tokens that follow the texts; `raw` stays, and may come back."""
        for stage in self._stages:
            raw = stage(raw)
        return raw

    def add(self, tokens: Tensor, is_added: Tensor) -> None:
        """Let tokens `[rows, 1]` join the texts of the walk where `is_added` `[rows, 1]`; others may be any number."""
        for penalty in self._penalties:
            penalty.add(tokens, is_added)
        self._lengths.add_(is_added)

    def end(self) -> None:
        """Make what was added part of the texts."""
        for kept, working in zip(self.state, self._working, strict=True):
            kept.copy_(working)


def obstacle_to(processors: LogitsProcessorList, num_rows: int) -> str | None:
    """Which processor has no form of fixed shape, in words; a subclass of one that has may do more."""
    for each in processors:
        kind, reason = type(each), None
        if kind not in _STAGES:
            reason = "is not known to work in tensors of fixed shape"
        elif _STAGES[kind] is _Bias and any(len(tokens) > 1 for tokens in each.sequence_bias):
            reason = "has a bias for several tokens in a row, which depends on the text"
        elif _STAGES[kind] is _PromptPenalty and len(each.encoder_input_ids) not in {1, num_rows}:
            reason = f"has {len(each.encoder_input_ids)} prompts for {num_rows} rows"

        if reason is not None:
            return f"the logits processor `{kind.__qualname__}` {reason}"

    return None


class _Stage:
    """A processor that runs as it is: it reads scores alone, and the host knows all that decides what it computes."""

    def __init__(self, each: Any, zeros: Tensor, lengths: Tensor) -> None:
        self.settings = self.settings_of(each)
        self._each, self._zeros = each, zeros
        self._lengths = lengths  # `[rows, 1]`, of the texts that the scores follow

    @classmethod
    def settings_of(cls, each: Any) -> tuple[Any, ...]:
        """What a capture freezes: processors that are alike in it are served by one captured work."""
        return (type(each), *sorted(vars(each).items()))

    def reset(self, of_rows: Sequence[Any]) -> None:
        """Take from a processor's copies for each row what may differ between calls."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Process scores `[rows, vocab]`."""
        return self._each(self._lengths[:, :0], scores)


class _Bias(_Stage):
    """A fixed bias for every token."""

    def __init__(self, each: Any, zeros: Tensor, lengths: Tensor) -> None:
        super().__init__(each, zeros, lengths)
        self._bias = self._zeros.clone()

    @classmethod
    def settings_of(cls, each: Any) -> tuple[Any, ...]:
        return (type(each),)

    def reset(self, of_rows: Sequence[Any]) -> None:
        self._bias.copy_(of_rows[0](self._lengths[:1, :0], self._zeros))

    def __call__(self, scores: Tensor) -> Tensor:
        return scores + self._bias


class _FixedScores(_Stage):
    """Fixed scores for some tokens, while the text has certain lengths."""

    def __init__(self, each: Any, zeros: Tensor, lengths: Tensor) -> None:
        super().__init__(each, zeros, lengths)
        self._of_ones, self._limits = self._zeros.clone(), self._zeros.new_zeros(2, dtype=torch.long)

    @classmethod
    def settings_of(cls, each: Any) -> tuple[Any, ...]:
        return (type(each),)

    def reset(self, of_rows: Sequence[Any]) -> None:
        first, last = _LENGTHS[type(of_rows[0])](of_rows[0])
        ones = torch.ones_like(self._zeros)
        ids = self._lengths[:1].expand(1, max(first, 0))
        self._of_ones.copy_(of_rows[0](ids, ones) if 0 <= first <= last else ones)
        self._limits.copy_(torch.tensor([first, last]))

    def __call__(self, scores: Tensor) -> Tensor:
        is_time = (self._lengths >= self._limits[:1]) & (self._lengths <= self._limits[1:])
        return torch.where(is_time & (self._of_ones != 1), self._of_ones, scores)


class _PromptPenalty(_Stage):
    """Another score for each token that was seen in a prompt, which stays as it is."""

    def __init__(self, each: Any, zeros: Tensor, lengths: Tensor) -> None:
        super().__init__(each, zeros, lengths)
        self._penalty, self.seen = each.penalty, zeros.repeat(len(lengths), 1) > 0

    @classmethod
    def settings_of(cls, each: Any) -> tuple[Any, ...]:
        return type(each), each.penalty

    def reset(self, of_rows: Sequence[Any]) -> None:
        for row, mine in enumerate(of_rows):
            _mark(self.seen[row : row + 1], mine.encoder_input_ids)

    def __call__(self, scores: Tensor) -> Tensor:
        penalised = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self.seen, penalised, scores)


class _Penalty(_PromptPenalty):
    """Another score for each token that was seen in the text, but for the first tokens, which may not count."""

    def __init__(self, each: Any, zeros: Tensor, lengths: Tensor) -> None:
        super().__init__(each, zeros, lengths)
        self.starts = torch.zeros_like(lengths)

    def reset(self, of_rows: Sequence[Any]) -> None:
        for row, mine in enumerate(of_rows):
            self.starts[row] = 0 if mine.prompt_ignore_length is None else mine.prompt_ignore_length

    def add(self, tokens: Tensor, is_added: Tensor) -> None:
        """Mark tokens `[rows, 1]` as seen where they are added."""
        tokens = tokens.clamp(0, self.seen.shape[1] - 1)
        counts = is_added & (self._lengths >= self.starts)
        self.seen.scatter_(1, tokens, self.seen.gather(1, tokens) | counts)


def _mark(seen: Tensor, ids: Tensor) -> None:
    """Mark the tokens `ids` `[1, tokens]` alone as seen `[1, vocab]`; ids beyond the vocabulary stand for images."""
    seen.zero_()[0, ids[0][ids[0] < seen.shape[1]]] = True


_Lengths: TypeAlias = Callable[[Any], tuple[int, int]]
# While the text has which lengths a processor sets fixed scores: the first and the last.
_LENGTHS: dict[type, _Lengths] = {
    stock.SuppressTokensLogitsProcessor: lambda _: (0, 2**62),
    stock.SuppressTokensAtBeginLogitsProcessor: lambda each: (each.begin_index, each.begin_index),
    stock.MinLengthLogitsProcessor: lambda each: (0, each.min_length - 1),
    stock.MinNewTokensLengthLogitsProcessor: lambda each: (0, each.prompt_length_to_skip + each.min_new_tokens - 1),
    stock.ForcedBOSTokenLogitsProcessor: lambda _: (1, 1),
    stock.ForcedEOSTokenLogitsProcessor: lambda each: (each.max_length - 1, each.max_length - 1),
}
_AS_THEY_ARE: set[type] = {
    *(stock.TemperatureLogitsWarper, stock.TopKLogitsWarper, stock.TopPLogitsWarper, stock.MinPLogitsWarper),
    *(stock.TypicalLogitsWarper, stock.EpsilonLogitsWarper, stock.LogitNormalization),
    stock.InfNanRemoveLogitsProcessor,
}
_STAGES: dict[type, type[_Stage]] = {
    **dict.fromkeys(_AS_THEY_ARE, _Stage),
    **dict.fromkeys(_LENGTHS, _FixedScores),
    stock.SequenceBiasLogitsProcessor: _Bias,
    stock.NoBadWordsLogitsProcessor: _Bias,
    stock.RepetitionPenaltyLogitsProcessor: _Penalty,
    stock.EncoderRepetitionPenaltyLogitsProcessor: _PromptPenalty,
}
