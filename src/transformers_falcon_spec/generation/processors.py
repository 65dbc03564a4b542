"""Logits processors and stopping criteria: which remember calls, which look at other rows, and copies by row."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..errors import OptionError

_ROW_TENSORS: dict[type, tuple[str, ...]] = {  # attributes with one entry for each row
    RepetitionPenaltyLogitsProcessor: ("prompt_ignore_length",),
    EncoderRepetitionPenaltyLogitsProcessor: ("encoder_input_ids",),
}
_WITH_MEMORY = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
ROW_CRITERIA: tuple[type, ...] = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)
_HISTORY_FREE = (
    *(TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper),
    *(EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization),
    SuppressTokensLogitsProcessor,
)


def read_scores_alone(processors: LogitsProcessorList) -> bool:
    """Whether no processor looks at the text, so that one call can process the scores after all nodes of a tree."""
    return all(type(processor) in _HISTORY_FREE for processor in processors)  # a subclass may look at more


def check_memoryless(processors: LogitsProcessorList, option: str) -> None:
    """Raise an error for processors that may remember their calls, as `option` calls them out of order."""
    for processor in processors:
        kind = type(processor)
        if isinstance(processor, _WITH_MEMORY) or _is_foreign(processor):
            raise OptionError(
                f"`{option}` asks for scores that may not become text, so every logits processor must be a function "
                f"of the text alone, but `{kind.__module__}.{kind.__qualname__}` "
                f"{'remembers' if isinstance(processor, _WITH_MEMORY) else 'may remember'} its calls. "
                'Set `drafter.generation_config.verifier = "token_matching"`.'
            )


def of_batches(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> list[Any]:
    """The processors and criteria that may look at several rows of a batch, which must then be shown at one length.

    They come from outside Transformers, or are criteria that are not known to read each row by itself.
    """
    foreign = [processor for processor in processors if _is_foreign(processor)]
    return [*foreign, *(criterion for criterion in criteria if type(criterion) not in ROW_CRITERIA)]


def _is_foreign(processor: Any) -> bool:
    return type(processor).__module__.split(".")[0] != "transformers"


def of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors for one row, which treat the only row they see as row `row` of the batch."""
    return LogitsProcessorList([_of_row(processor, row) for processor in processors])


def _of_row(processor: Any, row: int) -> Any:
    kind = type(processor)
    if kind in _MAKERS:
        return _MAKERS[kind](processor, row)
    if kind in _ROW_TENSORS:
        mine = copy.copy(processor)
        for name in _ROW_TENSORS[kind]:
            value = getattr(processor, name)
            if isinstance(value, Tensor) and value.dim() and len(value) > 1:
                setattr(mine, name, int(value[row]) if value.dim() == 1 else value[row : row + 1])
        return mine
    return processor  # all others keep nothing and read each row by itself


def _prefix_constrained(processor: Any, row: int) -> Any:
    allowed: Callable[[int, Tensor], list[int]] = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _row, ids: allowed(row, ids), num_beams=1)


def _guidance(processor: Any, row: int) -> Any:
    """Classifier-free guidance for one row, with a cache of its own for the unconditional text."""
    mine = copy.copy(processor)
    mine.unconditional_context = {
        name: value[row : row + 1] if isinstance(value, Tensor) else value
        for name, value in processor.unconditional_context.items()
    }
    return mine


def _no_repeat_of_prompt(processor: Any, row: int) -> Any:
    mine = copy.copy(processor)
    mine.batch_size = 1
    mine.generated_ngrams = processor.generated_ngrams[row : row + 1]
    return mine


_MAKERS: dict[type, Callable[[Any, int], Any]] = {
    PrefixConstrainedLogitsProcessor: _prefix_constrained,
    UnbatchedClassifierFreeGuidanceLogitsProcessor: _guidance,
    EncoderNoRepeatNGramLogitsProcessor: _no_repeat_of_prompt,
    SynthIDTextWatermarkLogitsProcessor: lambda processor, _row: copy.deepcopy(processor),
}
