"""Logits processors and stopping criteria: which remember calls, which look at other rows, and copies by row."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as stock
from transformers.generation import stopping_criteria as stop

from ..errors import OptionError


class RowCriteria(stop.StoppingCriteria):
    """A stopping criterion for each row of a batch, which lets rows grow at their own pace.

    Other criteria from outside Transformers may look at several rows, so that rows wait for one another at each token.
    These say which row they are for. They must not draw from the random stream.

    Args:
        rows (`Sequence[Callable[[Tensor], bool]]`):
            For each row whether its text ends. It is given the token ids `[tokens]` after each of the row's tokens,
            prompt and padding included, and may be asked again once the row has ended.

    Raises:
        [`OptionError`]: the batch has another number of rows.

    Example:

    ```python
    >>> RowCriteria([lambda ids: len(ids) > 2, lambda ids: bool(ids[-1] == 7)])(torch.tensor([[5, 6], [8, 7]]), None)
    tensor([False,  True])

    ```
    """

    eos_token_id = ()  # `generate` fills up rows that have ended where a criterion has this attribute

    def __init__(self, rows: Sequence[Callable[[Tensor], bool]]) -> None:
        self.rows = rows

    def check(self, num_rows: int) -> None:
        """Raise an error unless the batch has as many rows."""
        if num_rows != len(self.rows):
            raise OptionError(
                f"`RowCriteria` must hold one criterion for each row, but it holds {len(self.rows)} for {num_rows} "
                "rows. Make one for each sequence that the call returns."
            )

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002  the signature of criteria
        """For each row of `input_ids` `[rows, tokens]` whether it ends."""
        self.check(len(input_ids))
        answers = [is_end(ids) for is_end, ids in zip(self.rows, input_ids, strict=True)]
        return torch.tensor(answers, device=input_ids.device)


_WITH_MEMORY = (stock.SynthIDTextWatermarkLogitsProcessor, stock.UnbatchedClassifierFreeGuidanceLogitsProcessor)
ROW_CRITERIA: set[type] = {
    *(stop.MaxLengthCriteria, stop.MaxTimeCriteria, stop.EosTokenCriteria, stop.StopStringCriteria),
    RowCriteria,
}
_HISTORY_FREE = {
    *(stock.TemperatureLogitsWarper, stock.TopKLogitsWarper, stock.TopPLogitsWarper, stock.MinPLogitsWarper),
    *(stock.TypicalLogitsWarper, stock.EpsilonLogitsWarper, stock.EtaLogitsWarper, stock.LogitNormalization),
    *(stock.InfNanRemoveLogitsProcessor, stock.SuppressTokensLogitsProcessor),
}


def read_scores_alone(processors: LogitsProcessorList) -> bool:
    """Whether no processor looks at the text, so that one call can process the scores after all nodes of a tree."""
    return _HISTORY_FREE.issuperset(map(type, processors))  # a subclass may look at more


def check_memoryless(processors: LogitsProcessorList, option: str) -> None:
    """Raise an error for processors that may remember their calls, as `option` calls them out of order."""
    for processor in processors:
        kind = type(processor)
        if isinstance(processor, _WITH_MEMORY) or _is_foreign(processor):
            raise OptionError(
                f"`{option}` is not registered with `asks_in_order=True`, so every logits processor must be a "
                f"function of the text alone, but `{kind.__module__}.{kind.__qualname__}` "
                f"{'remembers' if isinstance(processor, _WITH_MEMORY) else 'may remember'} its calls. "
                'Set `drafter.generation_config.verifier = "token_matching"`.'
            )


def of_batches(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> list[Any]:
    """What may look at several rows of a batch: foreign processors, and criteria not known to look at one row."""
    foreign = [processor for processor in processors if _is_foreign(processor)]
    return [*foreign, *(criterion for criterion in criteria if type(criterion) not in ROW_CRITERIA)]


def reader_in(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> str:
    """The first of them that runs code of the caller's, in words; nothing if none does."""
    for each in (*processors, *criteria):
        if _is_foreign(each) or isinstance(each, stock.PrefixConstrainedLogitsProcessor):
            return f"`{type(each).__qualname__}`"
    return ""


def _is_foreign(processor: Any) -> bool:
    return type(processor).__module__.split(".")[0] != "transformers"


def of_row(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """The processors for one row, which treat the only row they see as row `row` of the `num_rows` of the batch."""
    mine = LogitsProcessorList()
    for processor in processors:
        changes = _ROW_ATTRIBUTES.get(type(processor))  # all others keep nothing and read each row by itself
        mine.append(processor if changes is None else copy.copy(processor))
        if changes is not None:
            vars(mine[-1]).update(changes(processor, row, num_rows))
    return mine


def criteria_of_rows(criteria: StoppingCriteriaList, num_rows: int) -> list[StoppingCriteriaList]:
    """The criteria that each row is asked by, where rows are asked one by one."""
    for each in criteria:
        if type(each) is RowCriteria:
            each.check(num_rows)

    found = []
    for row in range(num_rows):
        mine = StoppingCriteriaList()
        for each in criteria:
            mine.append(RowCriteria(each.rows[row : row + 1]) if type(each) is RowCriteria else each)
        found.append(mine)
    return found


def possible_ends(criteria: StoppingCriteriaList) -> tuple[float, set[int]]:
    """From which length on a row may end, and after which tokens: elsewhere its criteria need not be asked."""
    first_end = math.inf
    end_ids: set[int] = set()
    for each in criteria:
        if type(each) is stop.EosTokenCriteria:
            end_ids.update(each.eos_token_id.flatten().tolist())
        elif type(each) is stop.MaxLengthCriteria:
            warned_from = each.max_position_embeddings or each.max_length  # it warns of texts behind the context
            first_end = min(first_end, each.max_length, warned_from)
        else:
            first_end = 0  # it may end a row anywhere, or do something else when it is asked

    return first_end, end_ids


def _entry(value: Any, row: int, num_rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    entry = value[_prompt_of(row, num_rows, len(value))]
    return int(entry) if value.dim() == 1 else entry[None]


def _prompt_of(row: int, num_rows: int, num_prompts: int) -> int:
    """The prompt that a row goes on from: `num_return_sequences` rows of one prompt stand side by side."""
    return row * num_prompts // num_rows


# What differs in the copy of a processor that one row gets.
_ROW_ATTRIBUTES: dict[type, Callable[[Any, int, int], dict[str, Any]]] = {
    stock.RepetitionPenaltyLogitsProcessor: lambda each, row, num_rows: {
        "prompt_ignore_length": _entry(each.prompt_ignore_length, row, num_rows)
    },
    stock.EncoderRepetitionPenaltyLogitsProcessor: lambda each, row, num_rows: {
        "encoder_input_ids": _entry(each.encoder_input_ids, row, num_rows)
    },
    stock.EncoderNoRepeatNGramLogitsProcessor: lambda each, row, num_rows: {
        "batch_size": 1,
        "generated_ngrams": [each.generated_ngrams[_prompt_of(row, num_rows, len(each.generated_ngrams))]],
    },
    stock.PrefixConstrainedLogitsProcessor: lambda each, row, _num_rows: {
        "_num_beams": 1,
        "_prefix_allowed_tokens_fn": lambda _row, ids: each._prefix_allowed_tokens_fn(row // each._num_beams, ids),
    },
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor: lambda each, row, num_rows: {  # with a cache of its own
        "unconditional_context": {
            name: _entry(value, row, num_rows) for name, value in each.unconditional_context.items()
        }
    },
    stock.SynthIDTextWatermarkLogitsProcessor: lambda each, *_: vars(copy.deepcopy(each)),
}
