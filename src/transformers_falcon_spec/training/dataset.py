"""Conversations as token ids with a mask of the assistant's tokens, and how batches of them are made."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import TrainingError
from .conversations import Message
from .mask_coverage import MaskCoverage

logger = logging.getLogger(__name__)

Example = dict[str, Any]  # `input_ids` and `assistant_mask`; a `FeatureCache` adds tensors `[tokens, width]`


class ConversationDataset(Dataset[Example]):
    """Tokenised conversations: `input_ids` and `assistant_mask`, both cut to `max_length`.

    The mask comes from the tokenizer's chat template: from its `{% generation %}` marks or, without them, from
    rendering each conversation before and after every assistant turn.

    Args:
        rows (`list[list[dict]]`): Conversations as `read_conversations` returns them.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer.
        max_length (`int`): Tokens of the longest example; longer ones are cut.
        origins (`list[str]`, *optional*): Where each row comes from, in words; by default its number.

    Raises:
        [`TrainingError`]: there is no chat template, or not one example holds an assistant token.
    """

    def __init__(
        self,
        rows: list[list[Message]],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        origins: Sequence[str] | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise TrainingError(
                f"The tokenizer `{tokenizer.name_or_path}` needs a chat template to tell what the assistant said, but "
                "it has none. Set `tokenizer.chat_template` and save it with the target."
            )
        has_marks = "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template
        encoded = [_encode(row, tokenizer, has_marks) for row in tqdm(rows, desc="tokenize", unit="row")]
        kept: list[Example] = []
        self.origins: list[str] = []
        for number, example in enumerate(encoded):
            if example and any(example["assistant_mask"][:max_length]):
                kept.append({name: values[:max_length] for name, values in example.items()})
                self.origins.append(origins[number] if origins is not None else f"row {number}")
        self.examples = kept
        masks = [example["assistant_mask"] for example in encoded if example]
        turns = [turn for row, example in zip(rows, encoded, strict=True) if example for turn in row]
        num_turns = sum(turn["role"] == "assistant" for turn in turns)
        self.coverage = MaskCoverage.count(kept, masks, num_turns, max_length)
        if not kept:
            raise TrainingError(_nothing_counts(len(rows), masks, tokenizer, max_length))
        source = "marked by the template" if has_marks else "found turn by turn"
        logger.info("%s, %s; %d rows without any left out.", self.coverage, source, len(rows) - len(kept))
        self.coverage.warn()

    def subset(self, indices: Iterable[int]) -> "ConversationDataset":
        """The examples at `indices`, in that order; `coverage` stays that of all examples."""
        chosen, subset = list(indices), copy.copy(self)
        subset.examples = [self.examples[index] for index in chosen]
        subset.origins = [self.origins[index] for index in chosen]
        return subset

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each example."""
        return [len(example["input_ids"]) for example in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def _nothing_counts(num_rows: int, masks: list[list[int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """An explanation of why no token counts."""
    if any(map(any, masks)):
        return (
            f"Not one of {num_rows} conversations has an assistant token in {max_length} tokens. Raise `max_length`, "
            "or shorten what stands before the first answer."
        )
    if masks:
        return (
            f"The mask of what the assistant says must cover something, but it covers 0 % of {num_rows} "
            f"conversations. Put `{{% generation %}}` marks around the assistant's words in the chat template of "
            f"`{tokenizer.name_or_path}`."
        )
    return (
        f"The chat template of `{tokenizer.name_or_path}` must take at least one conversation, but it refuses all "
        f"{num_rows}. The log says why; bring the conversations into its form."
    )


def _encode(row: list[Message], tokenizer: PreTrainedTokenizerBase, has_marks: bool) -> Example | None:
    """The row's tokens and mask; None, with a warning, where the chat template refuses the row."""
    try:
        return _encode_marked(row, tokenizer) if has_marks else _encode_by_turns(row, tokenizer)
    except TemplateError as error:
        logger.warning("Left out: the chat template refuses a conversation: %s", error)
        return None


def _encode_marked(row: list[Message], tokenizer: PreTrainedTokenizerBase) -> Example:
    encoded = _templated(row, tokenizer, return_assistant_tokens_mask=True)
    return {"input_ids": list(encoded["input_ids"]), "assistant_mask": list(encoded["assistant_masks"])}


def _encode_by_turns(row: list[Message], tokenizer: PreTrainedTokenizerBase) -> Example:
    ids = _render(row, tokenizer)
    mask = [0] * len(ids)
    for number, message in enumerate(row):
        if message["role"] == "assistant":
            before = _render(row[:number], tokenizer, add_generation_prompt=True)
            after = _render(row[: number + 1], tokenizer)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise TrainingError(
                    f"The chat template of `{tokenizer.name_or_path}` rewrites earlier turns, so the assistant's "
                    "tokens cannot be told apart. Add `{% generation %}` marks around them in the template."
                )
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return {"input_ids": ids, "assistant_mask": mask}


def _render(row: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    return list(_templated(row, tokenizer, **options)["input_ids"])


def _templated(row: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> BatchEncoding:
    return cast(BatchEncoding, tokenizer.apply_chat_template(row, return_dict=True, **options))


class ConversationCollator:
    """Makes batches of examples by padding them on the right.

    A batch holds `input_ids`, `attention_mask` and `assistant_mask`, each `[rows, tokens]`. Tensors of a
    `FeatureCache` are padded with zeros. The `position_ids` of packed rows are continued through the padding.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id or 0

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        """Make a batch."""
        longest = max(len(example["input_ids"]) for example in examples)
        batch = {
            "input_ids": torch.full((len(examples), longest), self.pad_token_id),
            "attention_mask": torch.zeros(len(examples), longest, dtype=torch.long),
            "assistant_mask": torch.zeros(len(examples), longest, dtype=torch.bool),
        }
        for row, example in enumerate(examples):
            length = len(example["input_ids"])
            batch["input_ids"][row, :length] = torch.tensor(example["input_ids"])
            batch["attention_mask"][row, :length] = 1
            batch["assistant_mask"][row, :length] = torch.tensor(example["assistant_mask"], dtype=torch.bool)
        if "position_ids" in examples[0]:
            rows = [example["position_ids"] for example in examples]
            rows = [[*row, *range(row[-1] + 1, row[-1] + 1 + longest - len(row))] for row in rows]
            batch["position_ids"] = torch.tensor(rows)
        for name in examples[0].keys() - batch.keys():
            batch[name] = pad_sequence([example[name] for example in examples], batch_first=True)
        return batch


class SeededLengthGroups(LengthGroupedSampler):
    """An order of the rows in which batches hold rows of similar length, and which depends on lengths and a seed only.

    So a resumed run reads the rows in the same order, and several processes with smaller batches do, too.

    Args:
        batch_size (`int`): Rows of one step, of all processes together.
        lengths (`list[int]`): Tokens of each row.
        seed (`Callable[[], int]`): Returns the seed of an epoch when that begins.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: Callable[[], int]) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """The order of one epoch."""
        self.generator.manual_seed(self._seed())
        return super().__iter__()
