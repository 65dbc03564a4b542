"""Conversations as token ids with a mask of the assistant's tokens, and how batches of them are made.

What was encoded once is kept in the cache of `datasets`, under a fingerprint of rows, tokenizer and template, so that
other processes and commands read it from there.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import ConversationError, OptionError, TrainingError
from . import chat_template, row_encoding
from .chat_template import ChatTemplate, Message, tokenizer_facts
from .checkpoints import explain_write_errors
from .mask_coverage import MaskCoverage
from .row_encoding import GIVEN, NUM_NAMED, Example, describe_rows, encode_row, given_row, short

if TYPE_CHECKING:
    from datasets import Dataset as Table

logger = logging.getLogger(__name__)

USUAL_SHARE = 0.95  # of the examples, whose length the drafter learns to look back over
NOTHING = "nothing that counts within `max_length`"  # a reason
BROKEN = "broken token ids"  # another


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
        num_turns = [sum(turn["role"] == "assistant" for turn in row) for row in rows]
        self._take(_encoded_table(rows, template), max_length, origins, num_turns)
        if not self._numbers:
            raise TrainingError(_nothing_counts(self, tokenizer))
        self._log()

    @classmethod
    def of_token_ids(cls, rows: Any, max_length: int, mask: str) -> "ConversationDataset":
        """The examples of rows that are tokenised already, whose column `mask` says what counts.

        Rows of which nothing can be used are left out with a warning; other columns are dropped.

        Raises:
            [`TrainingError`]: none of the rows can be used.
        """
        data = cls.__new__(cls)
        data.template_kwargs, data.treatments = {}, Counter()
        data._take(_given_table(rows, mask), max_length)
        if not data._numbers:
            raise TrainingError(
                "At least one row must have `input_ids` and a mask of as many tokens, of which one counts within "
                f"{max_length} tokens, but of {describe_rows(data.treatments)}.{data._first_error}"
            )
        data._log()
        return data

    def _take(
        self,
        table: "Table",
        max_length: int,
        origins: Sequence[str] | None = None,
        num_turns: Sequence[int] | None = None,
    ) -> None:
        """Take the examples of a table in which something counts; `num_turns` of the assistant are in each row."""
        self.max_length, self.origins = max_length, list[str]()
        self._table = table.select_columns(["input_ids", "assistant_mask"])
        self._numbers: list[int] = []  # of the examples in the table
        self._first_error = ""
        masks, treatments, errors = list(_masks(table)), table["treatment"][:], table["error"][:]
        total_turns = 0
        for row, examples in groupby(range(len(table)), key=table["row"][:].__getitem__):
            members = list(examples)
            first, origin = members[0], f"row {row}" if origins is None else origins[row]
            if errors[first] is not None:
                self._leave_out(origin, treatments[first], errors[first])
                continue
            total_turns += 0 if num_turns is None else num_turns[row]
            kept = [number for number in members if masks[number][:max_length].any()]
            self.treatments[treatments[first] if kept else NOTHING] += 1
            self._numbers += kept
            self.origins += [origin if len(members) == 1 else f"{origin}, answer {each - first + 1}" for each in kept]
        self.lengths = [min(len(masks[number]), max_length) for number in self._numbers]
        self.coverage = MaskCoverage.count(masks, total_turns, max_length)

    def _log(self) -> None:
        logger.info("%s; of %s.", self.coverage, describe_rows(self.treatments))
        self.coverage.warn()

    def _leave_out(self, origin: str, reason: str, error: str) -> None:
        self.treatments[reason] += 1
        self._first_error = self._first_error or f" The first: {origin}: {error}."
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

    @property
    def examples(self) -> list[Example]:
        """All examples."""
        return [self[index] for index in range(len(self))]

    def check_ids(self, vocab_size: int) -> None:
        """Check that a target with so many embeddings can read the token ids: [`TrainingError`]."""
        least_and_greatest = pc.min_max(pc.list_flatten(self._table.data.column("input_ids"))).as_py()
        for found in least_and_greatest.values():
            if not 0 <= found < vocab_size:
                raise TrainingError(
                    f"Token ids must be 0 to {vocab_size - 1}, for the target has {vocab_size} embeddings, but the "
                    f"data have {found}{self._place_of(found)}. Take the target's own tokenizer, or give the target "
                    "embeddings for added tokens: `target.resize_token_embeddings(len(tokenizer))`."
                )

    def _place_of(self, token_id: int) -> str:
        found = (
            origin for origin, row in zip(self.origins, self.examples, strict=True) if token_id in row["input_ids"]
        )
        return "".join(f", in {origin}" for origin in islice(found, 1))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        example = self._table[self._numbers[index]]
        return {name: values[: self.max_length] for name, values in example.items()}


def _encoded_table(rows: Sequence[list[Message]], template: ChatTemplate) -> "Table":
    """The examples of all rows, uncut; rows that cannot be used have an error. It is read from the cache, if there."""
    import datasets  # noqa: PLC0415  it takes a second
    from datasets.fingerprint import Hasher  # noqa: PLC0415

    texts = [json.dumps(row) for row in rows]
    code = [Path(str(module.__file__)).read_bytes() for module in (chat_template, row_encoding)]
    fingerprint = Hasher.hash([texts, code, tokenizer_facts(template.tokenizer), dict(template.kwargs)])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "transformers_falcon_spec"
    file = folder / f"{fingerprint}.arrow"
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):  # one process encodes, the others wait and read
            return datasets.Dataset.from_dict({"text": texts}).map(
                lambda batch, numbers: _encode(batch["text"], numbers, template),
                batched=True,
                with_indices=True,
                remove_columns=["text"],
                features=_features(),
                cache_file_name=str(file),
                new_fingerprint=fingerprint,
                desc="tokenize",
            )


def _given_table(rows: Any, mask: str) -> "Table":
    """The same of rows that are tokenised already."""
    import datasets  # noqa: PLC0415  it takes a second

    def encode(batch: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, list[Any]]:
        columns = zip(batch["input_ids"], batch[mask], strict=True)
        return _columns(numbers, [_given(ids, marks, mask) for ids, marks in columns])

    if isinstance(rows, datasets.Dataset):
        plain = rows.with_format(None)
        options: dict[str, Any] = {"batched": True, "with_indices": True, "features": _features(), "desc": "check"}
        return plain.map(encode, remove_columns=plain.column_names, **options)
    found = [(row.get("input_ids"), row.get(mask)) for row in rows]
    columns = encode({"input_ids": [ids for ids, _ in found], mask: [marks for _, marks in found]}, range(len(found)))
    return datasets.Dataset.from_dict(columns, features=_features())


def _features() -> Any:
    from datasets import Features, List, Value  # noqa: PLC0415  it takes a second

    words = {"row": Value("int64"), "treatment": Value("string"), "error": Value("string")}
    return Features(words | {"input_ids": List(Value("int64")), "assistant_mask": List(Value("int8"))})


Encoded = tuple[str, list[Example], str | None]  # treatment or reason, examples, error


def _encode(texts: Sequence[str], numbers: Sequence[int], template: ChatTemplate) -> dict[str, list[Any]]:
    """The columns of the examples of some rows."""
    return _columns(numbers, [_encode_text(text, template) for text in texts])


def _encode_text(text: str, template: ChatTemplate) -> Encoded:
    try:
        treatment, found = encode_row(json.loads(text), template)
    except ConversationError as error:
        return getattr(error, "reason", BROKEN), [], short(error)
    return treatment, found, None


def _given(ids: Any, marks: Any, mask: str) -> Encoded:
    try:
        return GIVEN, [given_row(ids, marks, mask)], None
    except ConversationError as error:
        return BROKEN, [], short(error)


def _columns(numbers: Sequence[int], encoded: Sequence[Encoded]) -> dict[str, list[Any]]:
    """The columns of a table: a line for each example, and one for each row without."""
    columns: dict[str, list[Any]] = {name: [] for name in _features()}
    for number, (treatment, found, error) in zip(numbers, encoded, strict=True):
        for example in found or [{"input_ids": [], "assistant_mask": []}]:
            facts = {"row": number, "treatment": treatment, "error": error}
            for name, value in {**facts, **example}.items():
                columns[name].append(value)
    return columns


def _masks(table: "Table") -> Iterator[Any]:
    """The masks of a table, as arrays that share its memory."""
    for chunk in table.data.column("assistant_mask").chunks:
        values = chunk.values.to_numpy()
        for start, end in pairwise(chunk.offsets.to_numpy()):
            yield values[start:end]


def usual_length(lengths: Sequence[int]) -> int:
    """The length that all but one in twenty of the examples keep to; 0 without any."""
    return sorted(lengths)[math.ceil(USUAL_SHARE * len(lengths)) - 1] if lengths else 0


def example_lengths(rows: Iterable[list[Message]], template: ChatTemplate) -> list[int]:
    """The number of tokens in each example of the rows that can be used, uncut."""
    lengths: list[int] = []
    for row in rows:
        with suppress(ConversationError, TypeError):  # of a content that is no text
            lengths += [len(example["input_ids"]) for example in encode_row(row, template)[1]]
    return lengths


def _nothing_counts(data: ConversationDataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """An explanation of why no token counts."""
    if data.coverage.num_beyond:
        return (
            f"Not one of {data.treatments[NOTHING]} conversations has an assistant token in {data.max_length} tokens. "
            "Raise `max_length`, or shorten what stands before the first answer."
        )
    if data.treatments[NOTHING]:
        return (
            "The mask of what the assistant says must cover something, but it covers 0 % of "
            f"{data.treatments[NOTHING]} conversations. Put `{{% generation %}}` marks around the assistant's words "
            f"in the chat template of `{tokenizer.name_or_path}`."
        )
    return (
        f"At least one conversation must fit the chat template of `{tokenizer.name_or_path}`, but "
        f"{describe_rows(data.treatments)}.{data._first_error} Bring the conversations into its form."
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
