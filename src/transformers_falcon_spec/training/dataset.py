"""Conversations as token ids with a mask of the assistant's tokens: what they hold, and how batches are made of them.

What was encoded once is kept in the cache of `datasets`, under a fingerprint of rows, tokenizer and template, so that
other processes and commands read it from there.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..drafters.config_fields import context_of
from ..errors import ConversationError, OptionError, TrainingError, naming_extras, short
from . import chat_template, row_encoding
from .chat_template import ChatTemplate, Message, tokenizer_facts
from .row_encoding import GIVEN, NUM_NAMED, Example, describe_rows, encode_row

if TYPE_CHECKING:
    from datasets import Dataset as Table

logger = logging.getLogger(__name__)

USUAL_SHARE = 0.95  # of the examples, whose length the drafter learns to look back over
LOW_SHARE = 0.1  # of the tokens; with less, nine tenths of the target's work are wasted
NOTHING = "nothing that counts within `max_length`"  # a reason
BROKEN = "broken token ids"  # another


def examples(num: int) -> str:
    """So many examples, in words."""
    return f"{num} example{'' if num == 1 else 's'}"


@dataclass(frozen=True)
class MaskCoverage:
    """How many tokens of the training data count in the loss."""

    num_examples: int  # with at least one counted token
    num_tokens: int  # of these examples, cut at `max_length`
    num_counted: int  # of these tokens: the assistant's
    num_beyond: int  # the assistant's tokens that were cut off, in all rows
    num_turns: int  # the assistant's, in all rows
    num_runs: int  # of counted tokens, in all rows before they are cut; each turn should be one

    @classmethod
    def count(cls, masks: Sequence[Any], num_turns: int, max_length: int) -> "MaskCoverage":
        """Count the tokens in the masks of all rows, which are cut at `max_length` and left out if nothing counts."""
        num_examples = num_tokens = num_counted = num_beyond = num_runs = 0
        for mask in masks:
            counted = int(mask[:max_length].sum(dtype=np.int64))
            num_beyond += int(mask[max_length:].sum(dtype=np.int64))
            num_runs += int((np.diff(mask, prepend=np.int8(0)) > 0).sum())
            if counted:
                num_examples += 1
                num_tokens += min(len(mask), max_length)
                num_counted += counted

        return cls(num_examples, num_tokens, num_counted, num_beyond, num_turns, num_runs)

    @property
    def share(self) -> float:
        """The share of the tokens that count, 0 to 1."""
        return self.num_counted / self.num_tokens if self.num_tokens else 0.0

    def __str__(self) -> str:
        beyond = f"; {self.num_beyond} more lie beyond the greatest length" if self.num_beyond else ""
        return (
            f"{examples(self.num_examples)}, {self.num_tokens} tokens, {self.num_counted} of them the assistant's and "
            f"counted in the loss ({self.share:.0%}){beyond}"
        )

    def warn(self) -> None:
        """Log a warning if the mask looks wrong."""
        if self.share < LOW_SHARE:
            logger.warning(
                "Only %.1f%% of the tokens count in the loss. Look at them with `falcon-spec train --show_masks`: the "
                "chat template may mark too little, or prompts may be long and answers cut by `max_length`.",
                100 * self.share,
            )

        if self.num_runs < self.num_turns:
            logger.warning(
                "The assistant has %d turns, but the mask has %d runs of counted tokens. Look at them with "
                "`falcon-spec train --show_masks`: the chat template seems to mark some of its turns only.",
                self.num_turns,
                self.num_runs,
            )


def datasets_library() -> Any:
    """The package `datasets`, imported when it is used, for it takes a second; [`OptionError`] where it is missing."""
    with naming_extras():
        return import_module("datasets")


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
        template = ChatTemplate(tokenizer, self.template_kwargs)
        self._take(_encoded_table(rows, template), max_length, origins, rows)
        if self._numbers:
            return

        if self.coverage.num_beyond:
            raise TrainingError(
                f"Not one of {self.treatments[NOTHING]} conversations has an assistant token in {max_length} tokens. "
                "Raise `max_length`, or shorten what stands before the first answer."
            )

        raise TrainingError(
            f"At least one conversation must fit the chat template of `{tokenizer.name_or_path}` and its mask of what "
            f"the assistant says must cover something, but of {describe_rows(self.treatments)}.{self._first_error} "
            "Bring the conversations into its form, and put `{% generation %}` marks around the assistant's words."
        )

    @classmethod
    def of_token_ids(cls, rows: Any, max_length: int, mask: str) -> "ConversationDataset":
        """The examples of rows that are tokenised already, whose column `mask` says what counts.

        What their `attention_mask` leaves out, if they have one, is padding and is left out here, too.

        Raises:
            [`TrainingError`]: nothing counts in any row, or the lists of a row are not of one length.
        """
        data = cls.__new__(cls)
        data.template_kwargs = {}
        data.treatments = Counter()
        encoded: list[Encoded] = []
        for number, row in enumerate(rows):
            held = {name: np.asarray(row[name]) for name in ("input_ids", mask, "attention_mask") if name in row}
            shapes = {name: values.shape for name, values in held.items()}
            if not {"input_ids", mask} <= held.keys() or len(shapes[mask]) != 1 or len({*shapes.values()}) > 1:
                raise TrainingError(
                    f"Row {number} must hold `input_ids` and `{mask}`, one list each and of one length, but it has "
                    f"the shapes {shapes}. Tokenise all rows in the same way."
                )

            example = {"input_ids": held["input_ids"], "assistant_mask": held[mask].astype(np.int8)}
            if "attention_mask" in held:  # padding, wherever it stands, is no text for the target
                is_token = held["attention_mask"].astype(bool)
                example = {name: values[is_token] for name, values in example.items()}

            encoded.append((GIVEN, [example], None))

        columns = _columns(range(len(encoded)), encoded)
        data._take(datasets_library().Dataset.from_dict(columns, features=_features()), max_length)
        if not data._numbers:
            raise TrainingError(
                f"At least one row must have a token that counts, within {max_length} tokens, but of "
                f"{describe_rows(data.treatments)}."
            )

        return data

    def _take(
        self,
        table: "Table",
        max_length: int,
        origins: Sequence[str] | None = None,
        rows: Sequence[list[Message]] | None = None,
    ) -> None:
        """Take the examples of a table in which something counts; it was made of these `rows`, if they had turns."""
        self.max_length = max_length
        self.origins: list[str] = []
        self._table = table.select_columns(["input_ids", "assistant_mask"])
        self._numbers: list[int] = []  # of the examples in the table
        self._first_error = ""

        masks = table.with_format("numpy", dtype=np.int8)["assistant_mask"][:]
        treatments = table["treatment"][:]
        errors = table["error"][:]
        num_turns = 0
        for row, numbers in groupby(range(len(table)), key=table["row"][:].__getitem__):
            members = list(numbers)
            first = members[0]
            origin = f"row {row}" if origins is None else origins[row]
            treatment = treatments[first]
            if errors[first] is not None:
                self.treatments[treatment] += 1
                self._first_error = self._first_error or f" The first: {origin}: {errors[first]}."
                if self.treatments[treatment] <= NUM_NAMED:
                    logger.warning("Left out: %s: %s: %s", origin, treatment, errors[first])

                continue

            num_turns += sum(turn["role"] == "assistant" for turn in rows[row]) if rows is not None else 0
            kept = [number for number in members if masks[number][:max_length].any()]
            self.treatments[treatment if kept else NOTHING] += 1
            self._numbers += kept
            for number in kept:
                self.origins.append(origin if len(members) == 1 else f"{origin}, answer {number - first + 1}")

        self.lengths = [min(len(masks[number]), max_length) for number in self._numbers]
        self.coverage = MaskCoverage.count(masks, num_turns, max_length)
        if self._numbers:
            logger.info("%s; of %s.", self.coverage, describe_rows(self.treatments))
            self.coverage.warn()

    @property
    def conversations(self) -> "ConversationDataset":
        """This data set; a [`FeatureCache`] has the one that it was made from."""
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of a training says of the data: rows by treatment, and arguments for the chat template."""
        return {"rows": dict(self.treatments), "template_kwargs": self.template_kwargs}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        example = self._table[self._numbers[index]]
        return {name: values[: self.max_length] for name, values in example.items()}


Encoded = tuple[str, list[Example], str | None]  # treatment or reason, examples, error


def _encoded_table(rows: Sequence[list[Message]], template: ChatTemplate) -> "Table":
    """The examples of all rows, uncut; rows that cannot be used have an error. It is read from the cache, if there."""
    datasets = datasets_library()

    def encode(batch: Mapping[str, list[str]], numbers: list[int]) -> dict[str, list[Any]]:
        return _columns(numbers, [_encoded_text(text, template) for text in batch["text"]])

    texts = list(map(json.dumps, rows))
    code = [Path(str(module.__file__)).read_bytes() for module in (chat_template, row_encoding)]
    facts = [texts, code, tokenizer_facts(template.tokenizer), dict(template.kwargs)]
    fingerprint = datasets.fingerprint.Hasher.hash(facts)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "transformers_falcon_spec"
    file = folder / f"{fingerprint}.arrow"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):  # one process encodes, the others wait and read
        table: Table = datasets.Dataset.from_dict({"text": texts}).map(
            encode,
            batched=True,
            with_indices=True,
            remove_columns=["text"],
            features=_features(),
            cache_file_name=str(file),
            new_fingerprint=fingerprint,
            desc="tokenize",
        )

    return table


def _features() -> Any:
    datasets = datasets_library()
    return datasets.Features(
        {
            "row": datasets.Value("int64"),
            "treatment": datasets.Value("string"),  # or the reason why the row cannot be used
            "error": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int64")),
            "assistant_mask": datasets.List(datasets.Value("int8")),
        }
    )


def _columns(numbers: Iterable[int], encoded: Iterable[Encoded]) -> dict[str, list[Any]]:
    """The columns of a table: a line for each example, and one for each row without."""
    columns: dict[str, list[Any]] = {name: [] for name in _features()}
    for number, (treatment, found, error) in zip(numbers, encoded, strict=True):
        for example in found or [{"input_ids": [], "assistant_mask": []}]:
            columns["row"].append(number)
            columns["treatment"].append(treatment)
            columns["error"].append(error)
            columns["input_ids"].append(example["input_ids"])
            columns["assistant_mask"].append(example["assistant_mask"])

    return columns


def _encoded_text(text: str, template: ChatTemplate) -> Encoded:
    try:
        treatment, found = encode_row(json.loads(text), template)
    except ConversationError as error:
        return getattr(error, "reason", BROKEN), [], short(error)

    return treatment, found, None


def usual_length(lengths: Sequence[int]) -> int:
    """The length that all but one in twenty of the examples keep to; 0 without any."""
    return sorted(lengths)[math.ceil(USUAL_SHARE * len(lengths)) - 1] if lengths else 0


def example_lengths(rows: Iterable[list[Message]], template: ChatTemplate) -> list[int]:
    """The number of tokens in each example of the rows that can be used, uncut."""
    lengths: list[int] = []
    for row in rows:
        with suppress(ConversationError, TypeError):  # of a content that is no text
            _, found = encode_row(row, template)
            lengths += [len(example["input_ids"]) for example in found]

    return lengths


def count_said(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """How often the assistant says each token in `examples`, `[vocab_size]`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in examples:
        is_assistant = torch.as_tensor(example["assistant_mask"], dtype=torch.bool)
        said = torch.as_tensor(example["input_ids"])[is_assistant]
        counts += torch.bincount(said[said < vocab_size], minlength=vocab_size)

    return counts


def most_frequent(counts: Tensor, num_tokens: int) -> list[int]:
    """The `num_tokens` ids that were counted most often, ascending; ties go to lower ids.

    Raises:
        [`OptionError`]: the vocabulary is smaller than that.

    Example:

    ```python
    >>> example = {"input_ids": [9, 9, 9, 4, 2, 4, 7], "assistant_mask": [0, 0, 0, 1, 1, 1, 1]}
    >>> most_frequent(count_said([example], vocab_size=10), num_tokens=2)
    [2, 4]

    ```
    """
    if not 1 <= num_tokens <= len(counts):
        raise OptionError(f"A draft vocabulary must have 1 to {len(counts)} tokens, but {num_tokens} are asked for.")

    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values.tolist()


def survey(data: Any, target: PreTrainedModel, distance: int, what: str) -> int:
    """Look at every row of a data set once, without cached features; returns the first that teaches something.

    Args:
        data (`Dataset`): Rows of `input_ids` and `assistant_mask`.
        target ([`~transformers.PreTrainedModel`]): The target that reads them.
        distance (`int`): Tokens from a feature to its label.
        what (`str`): What the data are, for messages.

    Raises:
        [`TrainingError`]: not one token can be drafted, or a row has tokens that the target does not know, or more
            than it has positions for.
    """
    rows = getattr(data, "conversations", data)
    embeddings: Any = target.get_input_embeddings()
    num_known = len(embeddings.weight)
    context = context_of(target.config) or math.inf
    usable = []

    for index in range(len(rows)):
        ids = np.asarray(rows[index]["input_ids"], dtype=np.int64)
        mask = np.asarray(rows[index]["assistant_mask"], dtype=bool)
        if len(ids) > context or not 0 <= ids.min(initial=0) <= ids.max(initial=0) < num_known:
            raise TrainingError(
                f"Row {index} of {what} must have at most {context} tokens, the target's context, and ids below "
                f"{num_known}, the number of its embeddings, but it has {len(ids)} tokens up to {ids.max()}. Take the "
                "target's own tokenizer, or give conversations under `messages`, which are cut to `max_length`."
            )

        if mask[distance + 1 :].any():
            usable.append(index)

    if not usable:
        raise TrainingError(
            f"{what.capitalize()} must hold at least one assistant token that can be drafted, but in {len(rows)} rows "
            f"there is none behind the first {distance + 1} tokens, which cannot be. Raise `max_length`."
        )

    if len(usable) < len(rows):
        logger.warning("%d of %d rows of %s teach nothing.", len(rows) - len(usable), len(rows), what)

    return usable[0]


class ConversationCollator:
    """Makes batches of examples by padding them on the right.

    A batch holds `input_ids`, `attention_mask` and `assistant_mask`, each `[rows, tokens]`. Tensors of a
    `FeatureCache` are padded with zeros.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id or 0

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        """Make a batch."""
        ids = [torch.tensor(example["input_ids"]) for example in examples]
        masks = [torch.tensor(example["assistant_mask"], dtype=torch.bool) for example in examples]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence(list(map(torch.ones_like, ids)), batch_first=True),
            "assistant_mask": pad_sequence(masks, batch_first=True),
        }
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
