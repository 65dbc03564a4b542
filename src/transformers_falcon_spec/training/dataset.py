"""Conversations as token ids with a mask of the assistant's tokens, and how batches of them are made."""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import OptionError, TrainingError
from .chat_template import ChatTemplate, Message
from .mask_coverage import MaskCoverage
from .row_encoding import NUM_NAMED, Example, UnusableRowError, describe_rows, encode_row

logger = logging.getLogger(__name__)

UNUSABLE = (TemplateError, TypeError, UnusableRowError)
USUAL_SHARE = 0.95  # of the examples, whose length the drafter learns to look back over
REFUSED, NOTHING = "refused by the chat template", "nothing that counts within `max_length`"  # reasons


class ConversationDataset(Dataset[Example]):
    """Tokenised conversations: `input_ids` and `assistant_mask`, both cut to `max_length`.

    The mask comes from the tokenizer's chat template: from its `{% generation %}` marks or, without them, from
    rendering each conversation before and after every assistant turn. Where the template rewrites earlier turns, each
    answer becomes an example of its own, in the text that the template gives when it is the last one. `treatments`
    counts the rows by what was made of them, and `describe_rows` says it in words.

    Args:
        rows (`list[list[dict]]`): Conversations as `read_conversations` returns them.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer.
        max_length (`int`): Tokens of the longest example; longer ones are cut.
        origins (`list[str]`, *optional*): Where each row comes from, in words; by default its number.
        template_kwargs (`dict`, *optional*): Arguments for the chat template.
        left_out (`dict`, *optional*): How many rows were left out before, by reason.

    Raises:
        [`TrainingError`]: there is no chat template, or not one example holds an assistant token.
        [`OptionError`]: the chat template does not know one of the `template_kwargs`.
    """

    def __init__(
        self,
        rows: list[list[Message]],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        origins: Sequence[str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        self.template_kwargs = dict(template_kwargs or {})
        self.treatments = Counter(left_out or {})
        self.examples, self.origins = list[Example](), list[str]()
        template, masks, num_turns = ChatTemplate(tokenizer, self.template_kwargs), list[list[int]](), 0
        for number, row in enumerate(tqdm(rows, desc="tokenize", unit="row")):
            origin = f"row {number}" if origins is None else origins[number]
            try:
                treatment, found = encode_row(row, template)
            except UNUSABLE as error:
                self._leave_out(origin, getattr(error, "reason", REFUSED), error)
                continue
            masks += [example["assistant_mask"] for example in found]
            num_turns += sum(turn["role"] == "assistant" for turn in row)
            kept = self._keep(found, origin, max_length)
            self.treatments[treatment if kept else NOTHING] += 1
        self.coverage = MaskCoverage.count(masks, num_turns, max_length)
        if not self.examples:
            raise TrainingError(_nothing_counts(self.treatments, masks, tokenizer, max_length))
        logger.info("%s; of %s.", self.coverage, describe_rows(self.treatments))
        self.coverage.warn()

    def _keep(self, found: list[Example], origin: str, max_length: int) -> int:
        """Keep those of a row's examples in which something counts, cut; returns how many."""
        kept = [number for number, example in enumerate(found, 1) if any(example["assistant_mask"][:max_length])]
        cut = [{name: values[:max_length] for name, values in found[number - 1].items()} for number in kept]
        self.examples += cut
        self.origins += [origin if len(found) == 1 else f"{origin}, answer {number}" for number in kept]
        return len(kept)

    def _leave_out(self, origin: str, reason: str, error: Exception) -> None:
        self.treatments[reason] += 1
        if self.treatments[reason] <= NUM_NAMED:
            logger.warning("Left out: %s: %s: %s", origin, reason, error)

    @property
    def conversations(self) -> "ConversationDataset":
        """This data set; a [`FeatureCache`] and [`PackedConversations`] have the one that they were made from."""
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of a training says of the data: rows by treatment, and arguments for the chat template."""
        return {"rows": dict(self.treatments), "template_kwargs": self.template_kwargs}

    def subset(self, indices: Iterable[int]) -> "ConversationDataset":
        """The examples at `indices`, in that order; `coverage` stays that of all examples."""
        subset, indices = copy.copy(self), list(indices)
        subset.examples = [self.examples[index] for index in indices]
        subset.origins = [self.origins[index] for index in indices]
        return subset

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each example."""
        return [len(example["input_ids"]) for example in self.examples]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def usual_length(lengths: Sequence[int]) -> int:
    """The length that all but one in twenty of the examples keep to; 0 without any."""
    return sorted(lengths)[math.ceil(USUAL_SHARE * len(lengths)) - 1] if lengths else 0


def example_lengths(rows: Iterable[list[Message]], template: ChatTemplate) -> list[int]:
    """The number of tokens in each example of the rows that can be used, uncut."""
    lengths: list[int] = []
    for row in rows:
        with suppress(*UNUSABLE):
            lengths += [len(example["input_ids"]) for example in encode_row(row, template)[1]]
    return lengths


def _nothing_counts(
    treatments: Counter[str], masks: list[list[int]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> str:
    """An explanation of why no token counts."""
    if any(map(any, masks)):
        return (
            f"Not one of {treatments[NOTHING]} conversations has an assistant token in {max_length} tokens. Raise "
            "`max_length`, or shorten what stands before the first answer."
        )
    if masks:
        return (
            f"The mask of what the assistant says must cover something, but it covers 0 % of {treatments[NOTHING]} "
            f"conversations. Put `{{% generation %}}` marks around the assistant's words in the chat template of "
            f"`{tokenizer.name_or_path}`."
        )
    return (
        f"At least one conversation must fit the chat template of `{tokenizer.name_or_path}`, but "
        f"{describe_rows(treatments)}. The log says why; bring the conversations into its form."
    )


def most_frequent_tokens(examples: Iterable[Example], vocab_size: int, num_tokens: int) -> list[int]:
    """The `num_tokens` ids that the assistant uses most often in `examples`, ascending; ties go to lower ids.

    Raises:
        [`OptionError`]: the vocabulary is smaller than that.

    Example:

    ```python
    >>> example = {"input_ids": [9, 9, 9, 4, 2, 4, 7], "assistant_mask": [0, 0, 0, 1, 1, 1, 1]}
    >>> most_frequent_tokens([example], vocab_size=10, num_tokens=2)
    [2, 4]

    ```
    """
    if not 1 <= num_tokens <= vocab_size:
        raise OptionError(f"A draft vocabulary must have 1 to {vocab_size} tokens, but {num_tokens} are asked for.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in examples:
        is_assistant = torch.as_tensor(example["assistant_mask"], dtype=torch.bool)
        counts += torch.bincount(torch.as_tensor(example["input_ids"])[is_assistant], minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values.tolist()


class ConversationCollator:
    """Makes batches of examples by padding them on the right.

    A batch holds `input_ids`, `attention_mask` and `assistant_mask`, each `[rows, tokens]`. Tensors of a
    `FeatureCache` are padded with zeros. The `position_ids` of packed rows are continued through the padding.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id or 0

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        """Make a batch."""
        ids = [torch.tensor(example["input_ids"]) for example in examples]
        masks = [torch.tensor(example["assistant_mask"], dtype=torch.bool) for example in examples]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "assistant_mask": pad_sequence(masks, batch_first=True),
        }
        if "position_ids" in examples[0]:
            longest = batch["input_ids"].shape[1]
            rows = [example["position_ids"] for example in examples]
            rows = [[*row, *range(row[-1] + 1, row[-1] + 1 + longest - len(row))] for row in rows]
            batch["position_ids"] = torch.tensor(rows)
        for name in examples[0].keys() - batch.keys():
            batch[name] = pad_sequence([example[name] for example in examples], batch_first=True)
        return batch


class SeededLengthGroups(LengthGroupedSampler):
    """An order of the rows in which batches hold rows of similar length, and which depends on lengths and a seed only.

    So a resumed run reads the rows in the same order, and several processes with smaller batches do, too. `seed` gives
    the seed of an epoch when that begins; `batch_size` counts the rows of a step, of all processes together.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: Callable[[], int]) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """The order of one epoch."""
        self.generator.manual_seed(self._seed())
        return super().__iter__()
