"""Reading conversations from files, folders, the Hub and memory, in the forms in which people keep them.

`datasets` reads folders, data sets of the Hub and tables; this module says what a row means. A row may be

- `{"messages": [{"role": ..., "content": ...}, ...]}`, also as `conversations` or `conversation` (LMSYS), with `from`
  and `value` (ShareGPT, OpenHermes), or the bare list;
- a question and an answer: `instruction`, `input` and `output` (Alpaca), `instruction`, `context` and `response`
  (Dolly), `prompt` and `completion`, and the like.

A row that cannot be used is left out and counted by its reason; the other rows are read all the same.
"""

import csv
import glob
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
from transformers import PreTrainedTokenizerBase

from ..errors import ConversationError, OptionError, TrainingError, quoted, short
from .chat_template import Message, ask_for_switch
from .dataset import ConversationDataset, datasets_library
from .row_encoding import NUM_NAMED, UnusableRowError, describe_rows

logger = logging.getLogger(__name__)

FILES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet")
PACKINGS = (".gz", ".bz2", ".xz", ".zst")

CONVERSATIONS = ("messages", "conversations", "conversation")  # columns that hold all turns
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")  # columns of one turn
EXPLAINED = ("instruction", "question")  # which may speak of what stands in another column, one of these:
MATERIALS = ("input", "context")
ANSWERS = ("completion", "response", "output", "answer", "solution")
SYSTEMS = ("system_prompt", "system")
MASKS = ("assistant_mask", "assistant_masks")  # ours, and that of `apply_chat_template`
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which rows hold thoughts

ROLES = {  # as they are called elsewhere
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
NO_TOOLS: tuple[Any, ...] = (None, "", "[]", [])  # a column `tools` that holds none


@dataclass(frozen=True)
class ConversationSet:
    """The conversations that were read, each once, and what was left out."""

    rows: list[list[Message]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each row: file and line, or data set and row
    reasons: Counter[str] = field(default_factory=Counter)  # why rows were left out: how many for each reason

    def split(self, held_out: Collection[int]) -> "tuple[ConversationSet, ConversationSet]":
        """The set without the rows at `held_out`, and one of these; only the first says what was left out.

        Rows that ask the same as a row of `held_out` go with it, so that no prompt is in both, unless these are most.
        """
        prompts = [_prompt(row) for row in self.rows]
        wanted = {prompts[number] for number in held_out}
        chosen = {number for number, prompt in enumerate(prompts) if prompt in wanted}
        if 2 * len(chosen) > len(self.rows):
            chosen = set(held_out)
            logger.warning(
                "Rows that are held out ask what rows of the training ask, too, for most rows ask the same."
            )

        rest = ConversationSet(reasons=self.reasons)
        apart = ConversationSet()
        for number, (row, origin) in enumerate(zip(self.rows, self.origins, strict=True)):
            part = apart if number in chosen else rest
            part.rows.append(row)
            part.origins.append(origin)

        return rest, apart

    def num_asked_by(self, other: "ConversationSet") -> int:
        """The number of rows that ask the same as a row of `other`."""
        prompts = {_prompt(row) for row in other.rows}
        return sum(_prompt(row) in prompts for row in self.rows)

    def encoded(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ConversationDataset:
        """The examples of the conversations."""
        return ConversationDataset(self.rows, tokenizer, max_length, self.origins, template_kwargs, self.reasons)


def read_conversations(sources: Any, limit: int | None = None, needs_answers: bool = True) -> ConversationSet:
    """Read conversations from all sources; broken rows, and copies of earlier ones, are left out with a warning.

    Args:
        sources (`str`, `Path`, data in memory, or a list of them):
            Files (`.json`, `.jsonl`, `.ndjson`, `.csv`, `.parquet`, each also packed, such as `.jsonl.gz`), folders
            that `datasets` reads, and names of data sets on the Hub. A folder or name may be followed by its split, or
            by its configuration and split: `NAME`, `NAME:SPLIT`, `NAME:CONFIGURATION:SPLIT`. In memory: lists of
            rows, and data sets of `datasets`.
        limit (`int`, *optional*):
            Stop after this many conversations, not counting copies.
        needs_answers (`bool`):
            Leave rows out that have no assistant turn. Otherwise they must end with a question, which `regenerate`
            answers.

    Returns:
        [`ConversationSet`]: the conversations, and what was left out.

    Raises:
        [`ConversationError`]: a source does not exist, or none of its rows can be used.
    """
    found = ConversationSet()
    seen = set[bytes]()
    first_error = ""
    for origin, row in chain.from_iterable(map(rows_of, _listed(sources))):
        if limit is not None and len(found.rows) >= limit:
            break

        try:
            messages = messages_of(row, needs_answers)
            key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()
            if key in seen:
                raise UnusableRowError("a copy of an earlier one", "the same conversation was read before.")
        except UnusableRowError as error:
            first_error = first_error or f" The first: {origin}: {error}"
            found.reasons[error.reason] += 1
            if found.reasons[error.reason] <= NUM_NAMED:
                logger.warning("Left out: %s: %s", origin, error)

            continue

        seen.add(key)
        found.rows.append(messages)
        found.origins.append(origin)

    if not found.rows:
        raise ConversationError(
            "At least one usable conversation is needed, but there is none "
            f"({describe_rows(found.reasons) if found.reasons else 'it is empty'}).{first_error} Give rows of "
            '`{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}`.'
        )

    if found.reasons:
        logger.warning("Left out: %s", ", ".join(f"{number} rows: {why}" for why, number in found.reasons.items()))

    return found


# Data of a trainer


def prepared(data: Any, tokenizer: Any, max_length: int, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Data as the trainer reads it: conversations in any form and tokenised rows become examples.

    Raises:
        [`TrainingError`]: the data have no rows, none can be used, or conversations come without a tokenizer.
    """
    if isinstance(data, Path):
        data = [data]
    if data is None or isinstance(data, str) or hasattr(data, "conversations"):  # a string names one of several
        return data
    if isinstance(data, Mapping):
        return {name: prepared(part, tokenizer, max_length, template_kwargs) for name, part in data.items()}
    if isinstance(data, Iterator):  # which gives each row once
        data = list(data)

    first = next(iter(data), None)  # a stream has no numbers
    if first is None:
        raise TrainingError("Data must have a row at least, but they are empty. Give conversations or tokenised rows.")

    columns = set(first) if isinstance(first, Mapping) else set()
    mask = next((name for name in MASKS if name in columns), None)
    if "input_ids" in columns and mask is not None:
        return ConversationDataset.of_token_ids(data, max_length, mask)

    if "input_ids" in columns and not columns & set(CONVERSATIONS):
        raise TrainingError(
            f"Rows with `input_ids` must say what the assistant says, as an `assistant_mask`, but they have "
            f"{sorted(columns)}. Tokenise with `apply_chat_template(..., return_assistant_tokens_mask=True, "
            "return_dict=True)`, or keep `messages`."
        )

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TrainingError(
            "`processing_class` must be the target's tokenizer where the data are conversations, but it is "
            f"`{type(tokenizer).__name__}`. Pass `processing_class=AutoTokenizer.from_pretrained(TARGET)`."
        )

    ask_for_switch(tokenizer, template_kwargs or {})
    return read_conversations(data).encoded(tokenizer, max_length, template_kwargs)


# Where rows come from


def _listed(sources: Any) -> list[Any]:
    """The sources, each by itself; a list of rows is one."""
    if not isinstance(sources, list | tuple):
        return [sources]

    is_of_rows = bool(sources) and isinstance(sources[0], Mapping | list)
    return [sources] if is_of_rows else list(sources)


def rows_of(source: Any) -> Iterator[tuple[str, Any]]:
    """The origin and the content of each row of a source; content that is no JSON is an error, to be counted."""
    if not isinstance(source, str | Path):
        yield from _numbered("", source.with_format(None) if hasattr(source, "with_format") else source)
        return

    name = str(source)
    try:
        is_file = Path(name).is_file() or (_ending(name) in FILES and not Path(name).is_dir())
        yield from _file_rows(name) if is_file else _dataset_rows(name)
    except (ConversationError, OptionError, ModuleNotFoundError):
        raise
    except Exception as error:  # of `datasets`, and of the many libraries that read files for it
        raise ConversationError(
            f"`{name}` must be readable to its end, but reading says: {short(error)}. Fetch it anew, or name another: "
            "a file, a folder, or a data set of the Hub as `NAME`, `NAME:SPLIT` or `NAME:CONFIGURATION:SPLIT`."
        ) from error


def _dataset_rows(source: str) -> Iterator[tuple[str, Any]]:
    """The rows of a folder or of a data set of the Hub."""
    datasets = datasets_library()
    name, *rest = [source] if Path(source).exists() else source.split(":")
    split = rest.pop() if rest else None
    configuration = rest.pop() if rest else None
    if (Path(name) / "dataset_info.json").is_file():
        rows = datasets.load_from_disk(name)
    else:
        rows = datasets.load_dataset(name, configuration, split=split or "train")

    yield from _numbered(f"{name}, ", rows.with_format(None))


def _numbered(place: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The rows with their origins, of which `place` is the beginning."""
    for number, row in enumerate(rows):
        yield f"{place}row {number}", row


def _ending(path: str) -> str:
    """The ending of a file's name in lower case, without that of a packing."""
    name = path.lower()
    for packing in PACKINGS:
        name = name.removesuffix(packing)

    return Path(name).suffix


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    if not Path(path).is_file():
        raise ConversationError(f"The data file `{path}` does not exist. Give the path of a file.")

    ending = _ending(path)
    if ending not in FILES:
        raise ConversationError(
            f"The data file `{path}` must be one of {', '.join(FILES)}, packed or not, but it ends in `{ending}`. "
            'Write a line for each conversation: `{"messages": [{"role": "user", "content": ...}, ...]}`.'
        )

    if ending == ".parquet":
        rows = datasets_library().load_dataset(
            "parquet", data_files=glob.escape(str(Path(path).absolute())), split="train", streaming=True
        )
        yield from _numbered(f"{path}, ", rows)
        return

    # what is no UTF-8 becomes an escape, which breaks its line only
    encoding = {"encoding": "utf-8-sig", "errors": "backslashreplace", "newline": ""}
    with fsspec.open(path, "rt", compression="infer", **encoding) as file:
        if ending == ".csv":
            yield from _numbered(f"{path}, ", csv.DictReader(file))
        else:
            yield from _json_rows(path, file.read())


def _json_rows(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """The rows of a text with one of them in each line, or with all of them in a list."""
    whole = _value(text)
    if isinstance(whole, list) and not _is_conversation(whole):
        yield from _numbered(f"{path}, ", whole)
        return

    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _value(line)


def _value(text: str) -> Any:
    """What a JSON text says, or the error that it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return UnusableRowError("no JSON", f"it must be JSON, but {short(error)}. Mend or delete it.")


# What a row means


def messages_of(row: Any, needs_answers: bool) -> list[Message]:
    """The messages of a row, in which there is something to learn, or to answer.

    Raises:
        [`UnusableRowError`]: the row is in no known form, or a message of it is not text by somebody known.
    """
    if isinstance(row, UnusableRowError):
        raise row

    messages = [_message(number, message) for number, message in enumerate(_turns(row, needs_answers), start=1)]

    is_asked = not needs_answers and messages[-1]["role"] == "user"
    if not is_asked and not any(message["role"] == "assistant" for message in messages):
        raise UnusableRowError(
            "no assistant turn", "a row must have an assistant turn, for that is what the drafter learns; it has none."
        )

    if messages[0]["role"] == "assistant":
        raise UnusableRowError("nothing before the first answer", "the assistant must have something to answer.")

    for number, message in enumerate(messages, start=1):
        is_empty = not message["content"].strip() and not message.get("reasoning_content")
        if needs_answers and message["role"] == "assistant" and is_empty:
            raise UnusableRowError("an empty answer", f"message {number} of the assistant must say something.")

    return messages


def _turns(row: Any, needs_answers: bool) -> list[Any]:
    """The messages of a row as they are given, at least one."""
    if _is_conversation(row):
        return list(row)

    if not isinstance(row, Mapping):
        kind = type(row).__name__
        raise UnusableRowError("no messages", f"a row must be an object with a list `messages`, but it is `{kind}`.")

    if row.get("tools") not in NO_TOOLS:
        raise UnusableRowError("tools", "a row must do without tools, but it has `tools`.")

    column = _first(row, CONVERSATIONS)
    question = _first(row, QUESTIONS)
    answer = _first(row, ANSWERS)
    if column is not None and isinstance(row[column], list) and row[column]:
        turns = list(row[column])
    elif question is not None and (answer is not None or not needs_answers):
        turns = _as_turns(row, question, "user")
        if answer is not None:
            turns += _as_turns(row, answer, "assistant")
    else:
        names = [str(name)[:30] for name in list(row)[:8]]
        raise UnusableRowError(
            "no messages",
            "a row must hold a list `messages` that is not empty, or columns such as `prompt` and `completion`, but "
            f"it has {names}.",
        )

    system = _first(row, SYSTEMS)
    has_system = isinstance(turns[0], Mapping) and ROLES.get(str(_role(turns[0]))) == "system"
    if system is not None and row[system] and not has_system:
        turns.insert(0, {"role": "system", "content": row[system]})

    return turns


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The first of the columns that holds something."""
    return next((name for name in columns if row.get(name) is not None), None)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and _role(value[0]) is not None


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role", message.get("from"))


def _as_turns(row: Mapping[str, Any], column: str, role: str) -> list[Any]:
    """The turns in a column that holds messages, or the text of one and of what it speaks of."""
    value = row[column]
    if _is_conversation(value):
        return list(value)

    materials = [name for name in MATERIALS if column in EXPLAINED and row.get(name)]
    if materials:
        value = _joined(row, [column, *materials])

    return [{"role": role, "content": value}]


def _joined(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The texts of several columns as one."""
    for name in columns:
        if not isinstance(row[name], str):
            kind = type(row[name]).__name__
            raise UnusableRowError(
                "no text", f"{quoted(columns)} are one turn and must be text, but `{name}` is `{kind}`."
            )

    return "\n\n".join(row[name] for name in columns)


def _message(number: int, given: Any) -> Message:
    """A message without what is of no use here; parts that are all text are joined."""
    name = _role(given) if isinstance(given, Mapping) else None
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableRowError(
            "an unknown role",
            f"each message needs a `role`, one of {list(ROLES)}, but message {number} has {repr(name)[:30]}.",
        )

    if given.get("tool_calls"):
        raise UnusableRowError("tools", f"a row must do without tools, but message {number} calls one.")

    content = given.get("content", given.get("value"))
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)

    if not isinstance(content, str):
        kind = type(content).__name__
        raise UnusableRowError(
            "no text", f"each message needs a `content` that is text alone, but that of message {number} is `{kind}`."
        )

    message = {"role": role, "content": content}
    thought = next((given[name] for name in THOUGHTS if given.get(name)), None)
    if role == "assistant" and isinstance(thought, str):
        message["reasoning_content"] = thought

    check_whole(message.values())
    return message


def check_whole(texts: Iterable[str]) -> None:
    """Check that texts are made of whole characters: no tokenizer takes half of one, which UTF-16 cut off."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise UnusableRowError("half a character", f"a text must be of whole characters, but {error}.") from None


def _prompt(row: Sequence[Message]) -> str:
    """What stands before the first answer."""
    roles = [message["role"] for message in row]
    end = roles.index("assistant") if "assistant" in roles else len(row)
    return json.dumps(row[:end])
