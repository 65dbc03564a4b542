"""Reading conversations from files, folders, the Hub and memory, in the forms in which people keep them.

`datasets` finds files and reads tables; this module says what a row means. A row may be

- `{"messages": [{"role": ..., "content": ...}, ...]}`, also as `conversations` or `conversation` (LMSYS), with `from`
  and `value` (ShareGPT, OpenHermes), as JSON text, as turns alone (`{"data": [question, answer, ...]}`, UltraChat), or
  the bare list;
- a question and an answer: `instruction`, `input` and `output` (Alpaca), `prompt` and `completion`, and the like;
- a `text`: an answer to an empty question, or a question where answers are to be written.

A row that cannot be used is left out and reported as a `ConversationError`; the other rows are read all the same.
"""

import glob
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import fsspec
from transformers import PreTrainedTokenizerBase

from ..errors import ConversationError, OptionError, TrainingError
from .chat_template import Message, ask_for_switch
from .dataset import ConversationDataset, datasets_library
from .row_encoding import NUM_NAMED, UnusableRowError, describe_rows, short

logger = logging.getLogger(__name__)

JSON_FILES = (".json", ".jsonl", ".ndjson")
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # and who reads them in `datasets`
PACKINGS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
ENDINGS = f"{', '.join([*JSON_FILES, *TABLES])}, packed or not"

CONVERSATIONS = ("messages", "conversations", "conversation", "data")  # columns that hold all turns
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")  # columns of one turn
ADDITIONS = ("input", "context")  # what an instruction speaks of
ANSWERS = ("completion", "response", "output", "answer", "solution")
SYSTEMS = ("system_prompt", "system")
MASKS = ("assistant_mask", "assistant_masks", "labels")  # ours, that of `apply_chat_template`, that of other trainers
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which rows hold thoughts

ROLES = {  # as they are called elsewhere
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = ("tool", "function", "ipython", "function_call", "observation", "function_response", "tool_response")
NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "{}", "null", [], {})  # a column `tools` that holds none


@dataclass(frozen=True)
class ConversationSet:
    """The conversations that were read, each once, and what was left out."""

    rows: list[list[Message]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each row: file and line, or data set and row
    errors: list[ConversationError] = field(default_factory=list)  # one for each row that was left out
    reasons: Counter[str] = field(default_factory=Counter)  # why rows were left out: how many for each reason
    ids: list[Any] = field(default_factory=list)  # of each row its `id`, None without
    forms: Counter[str] = field(default_factory=Counter)  # the columns that rows were read from: how many rows of each

    def split(self, held_out: Collection[int]) -> "tuple[ConversationSet, ConversationSet]":
        """The set without the rows at `held_out`, and one of these; only the first says what was left out.

        Rows that ask the same as a row of `held_out` go with it, so that no prompt is in both.
        """
        prompts = list(map(_prompt, self.rows))
        wanted = {prompts[number] for number in held_out}
        chosen = [number for number, prompt in enumerate(prompts) if prompt in wanted]
        if 2 * len(chosen) > len(self.rows):
            logger.warning(
                "The held-out part asks what the training part asks, too: %d of %d rows share their prompts with it.",
                len(chosen),
                len(self.rows),
            )
            chosen = sorted(held_out)

        rest = sorted(set(range(len(self.rows))).difference(chosen))
        kept = self._only(rest)
        return replace(self, rows=kept.rows, origins=kept.origins, ids=kept.ids), self._only(chosen)

    def _only(self, numbers: Sequence[int]) -> "ConversationSet":
        ids = self.ids or [None] * len(self.rows)
        return ConversationSet(
            rows=[self.rows[number] for number in numbers],
            origins=[self.origins[number] for number in numbers],
            ids=[ids[number] for number in numbers],
        )

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
            Files (`.json`, `.jsonl`, `.ndjson`, `.csv`, `.tsv`, `.parquet`, `.arrow`, each also packed, such as
            `.jsonl.gz`), folders of them, folders of `save_to_disk`, and names of data sets on the Hub. A folder or
            name may be followed by its split, or by its configuration and split: `NAME`, `NAME:SPLIT`,
            `NAME:CONFIGURATION:SPLIT`. In memory: rows, data sets of `datasets`, tables of pandas, Arrow and polars.
        limit (`int`, *optional*):
            Stop after this many conversations, not counting copies.
        needs_answers (`bool`):
            Leave rows out that have no assistant turn. Otherwise they must end with a question, which `regenerate`
            answers.

    Returns:
        [`ConversationSet`]: the conversations, and what was left out.

    Raises:
        [`ConversationError`]: a source does not exist, or none of its rows can be used.
        [`OptionError`]: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"`limit` must be at least 1, but it is {limit}. Leave it out to read all.")

    found = ConversationSet()
    seen = set[bytes]()
    given = _listed(sources)
    for origin, row in chain.from_iterable(map(rows_of, given)):
        if limit is not None and len(found.rows) >= limit:
            break
        try:
            form, messages = messages_of(row, needs_answers)
            _check_turns(messages, needs_answers)
            key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()
            if key in seen:
                raise UnusableRowError("a copy of an earlier one", "the same conversation was read before.")
        except UnusableRowError as error:
            found.errors.append(ConversationError(f"{origin}: {error}"))
            found.reasons[error.reason] += 1
            if found.reasons[error.reason] <= NUM_NAMED:
                logger.warning("Left out: %s", found.errors[-1])
            continue

        seen.add(key)
        found.rows.append(messages)
        found.origins.append(origin)
        found.ids.append(row.get("id") if isinstance(row, Mapping) else None)
        found.forms[form] += 1

    for form, number in found.forms.items():
        logger.info("%d rows read from %s.", number, form)

    for reason, number in found.reasons.items():
        if number > NUM_NAMED:
            logger.warning("Left out: %d rows in all: %s.", number, reason)

    if not found.rows:
        first = f" The first: {found.errors[0]}" if found.errors else ""
        raise ConversationError(
            f"At least one usable conversation is needed, but {', '.join(map(_name, given))} gave none "
            f"({describe_rows(found.reasons) if found.reasons else 'it is empty'}).{first} Give rows of "
            '`{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}`.'
        )

    return found


# Data of a trainer


def prepared(data: Any, tokenizer: Any, max_length: int, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Data as the trainer reads it: conversations in any form and tokenised rows become examples.

    Raises:
        [`TrainingError`]: the data have no length or no rows, none can be used, or conversations come without a
            tokenizer.
    """
    if isinstance(data, Path):
        data = [data]
    if data is None or isinstance(data, str) or hasattr(data, "conversations"):  # a string names one of several
        return data
    if is_several(data):
        return {name: prepared(part, tokenizer, max_length, template_kwargs) for name, part in data.items()}

    columns = _columns(data)
    mask = next((name for name in MASKS if name in columns), None)
    if "input_ids" in columns and mask is not None:
        if mask == "labels":
            logger.info("What counts is taken from `labels`: all tokens but those of -100.")
        return ConversationDataset.of_token_ids(plain_rows(data), max_length, mask)
    if "input_ids" in columns and not columns & set(CONVERSATIONS):
        raise TrainingError(
            "Rows with `input_ids` must say what the assistant says, as an `assistant_mask` or as `labels` that are "
            f"-100 elsewhere, but they have {sorted(columns)}. Tokenise with `apply_chat_template(..., "
            "return_assistant_tokens_mask=True, return_dict=True)`, or keep `messages`."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TrainingError(
            "`processing_class` must be the target's tokenizer where the data are conversations, but it is "
            f"`{type(tokenizer).__name__}`. Pass `processing_class=AutoTokenizer.from_pretrained(TARGET)`."
        )

    ask_for_switch(tokenizer, template_kwargs or {})
    return read_conversations(data).encoded(tokenizer, max_length, template_kwargs)


def is_several(data: Any) -> bool:
    """Whether data are several data sets by name, and not the columns of one."""
    known = {*CONVERSATIONS, *QUESTIONS, "input_ids", "text"}
    return isinstance(data, Mapping) and not known & set(data)


def _columns(data: Any) -> set[str]:
    """The names of the columns; none of a list of files or of bare conversations."""
    if not hasattr(data, "__len__"):
        raise TrainingError(
            "Data must have a length, for batches hold rows of similar lengths, but they are a "
            f"`{type(data).__name__}`. Take a part of a stream: `Dataset.from_list(list(stream.take(10_000)))`."
        )
    if not len(data):
        raise TrainingError("Data must have a row at least, but they are empty. Give conversations or tokenised rows.")

    names = getattr(data, "column_names", getattr(data, "columns", None))  # of `datasets` and Arrow; of pandas, polars
    if names is None:
        first = data if isinstance(data, Mapping) else data[0]
        names = first.keys() if isinstance(first, Mapping) else ()
    return set(map(str, names))


# Where rows come from


def _listed(sources: Any) -> list[Any]:
    """The sources, each by itself; a list of rows is one."""
    if not isinstance(sources, list | tuple):
        return [sources]
    first = sources[0] if sources else None
    is_row = _is_conversation(first) or (isinstance(first, Mapping) and not hasattr(first, "with_format"))
    return [sources] if is_row else list(sources)


def _name(source: Any) -> str:
    """A source in words, never with what it holds."""
    if isinstance(source, str | Path):
        return f"`{source}`"
    number = f" of {len(source)} rows" if hasattr(source, "__len__") else ""
    return f"a `{type(source).__name__}`{number}"


def rows_of(source: Any) -> Iterator[tuple[str, Any]]:
    """The origin and the content of each row of a source; content that is no JSON is an error, to be counted."""
    try:
        if isinstance(source, str | Path):
            yield from _stored_rows(str(source))
        else:
            for number, row in enumerate(plain_rows(source)):
                yield f"row {number}", _plain(row)
    except (ConversationError, OptionError, ModuleNotFoundError):
        raise
    except Exception as error:  # of `datasets`, and of the many libraries that read files for it
        raise ConversationError(
            f"{_name(source)} must be readable to its end, but reading says: {short(error)}. Fetch it anew, or "
            "name another: a file, a folder, or a data set of the Hub as `NAME`, `NAME:SPLIT` or "
            "`NAME:CONFIGURATION:SPLIT`."
        ) from error


def plain_rows(data: Any) -> Iterable[Any]:
    """The rows of a table, a data set or a list, whatever its format."""
    if hasattr(data, "with_format"):  # a data set of `datasets`, or several of them
        data = data.with_format(None)
    if isinstance(data, Mapping):
        is_several = any(hasattr(part, "with_format") for part in data.values())
        return _part(data, None, "the data") if is_several else _by_rows(data)
    if hasattr(data, "iterrows"):  # pandas
        return data.astype(object).where(data.notna(), None).to_dict("records")

    as_rows = getattr(data, "to_pylist", None) or getattr(data, "to_dicts", None)  # of Arrow, of polars
    if as_rows is not None:
        return as_rows()

    is_iterable = hasattr(data, "__iter__") or not hasattr(data, "__len__")
    return data if is_iterable else map(data.__getitem__, range(len(data)))


def _by_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
    """Arrays as lists, also within rows, and nothing where pandas writes NaN for it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return None if isinstance(value, float) and math.isnan(value) else value


def _stored_rows(source: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file, a folder or a data set of the Hub."""
    path = Path(source)
    is_file = path.is_file() or _ending(source) in (*JSON_FILES, *TABLES)
    if is_file and not path.is_dir():
        yield from _file_rows(source)
        return

    name, *rest = [source] if path.exists() else source.split(":")
    if len(rest) > len(("configuration", "split")):
        raise ConversationError(
            f"A data set must be named as `NAME`, `NAME:SPLIT` or `NAME:CONFIGURATION:SPLIT`, but it is `{source}`."
        )

    split = (rest or [""])[-1] or None
    configuration = (rest[:-1] or [""])[0] or None

    datasets = datasets_library()
    if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):  # of `save_to_disk`
        rows = datasets.load_from_disk(name).with_format(None)
        if isinstance(rows, Mapping):
            rows = _part(rows, split, f"`{name}`")
    else:  # `datasets` says which files are in which split
        files = datasets.load_dataset_builder(name, configuration).config.data_files
        if files is not None:
            for file in datasets.DownloadManager().download(list(_part(files, split, f"`{name}`"))):
                yield from _file_rows(str(file))
            return
        rows = datasets.load_dataset(name, configuration, split=split or "train")  # it is only in the cache

    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row


def _part(parts: Mapping[Any, Any], wanted: str | None, name: str) -> Any:
    """The split that is wanted, by default `train`, or the only one."""
    by_name = dict(zip(map(str, parts), parts.values(), strict=True))
    if wanted is None:
        wanted = next(iter(by_name)) if len(by_name) == 1 else "train"
    if wanted not in by_name:
        raise ConversationError(
            f"{name} must have the split `{wanted}` to be read, but it has {sorted(by_name)}. "
            "Name one of these, as in `NAME:SPLIT`."
        )
    if wanted != "train":
        logger.info("The split `%s` of %s is read.", wanted, name)
    return by_name[wanted]


def _ending(path: str) -> str:
    """The ending of a file's name in lower case, without that of a packing."""
    name = path.lower()
    for packing in PACKINGS:
        name = name.removesuffix(packing)
    return Path(name).suffix


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    if not Path(path).is_file():
        raise ConversationError(f"The data file `{path}` does not exist. Give the path of a file ({ENDINGS}).")

    ending = _ending(path)
    if ending in JSON_FILES:
        return _json_rows(path)
    if ending in TABLES:
        return _table_rows(path, ending)

    raise ConversationError(
        f"The data file `{path}` must be one of {ENDINGS}, but it ends in `{ending}`, and such a file does not say "
        'where a conversation begins. Write a line for each: `{"messages": [{"role": "user", "content": ...}, ...]}`.'
    )


def _table_rows(path: str, ending: str) -> Iterator[tuple[str, Any]]:
    """The rows of a table, without a copy on the disk; those of text keep all as it is written, also empty fields."""
    datasets = datasets_library()
    kind = TABLES[ending]
    options: dict[str, Any] = {"split": "train", "streaming": True}
    options["data_files"] = glob.escape(str(Path(path).absolute()))
    if kind == "csv":
        options |= {"sep": "\t" if ending == ".tsv" else ",", "encoding": "utf-8-sig", "keep_default_na": False}
        columns: dict[str, Any] = next(iter(datasets.load_dataset(kind, **options)), {})
        options["features"] = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))

    for number, row in enumerate(datasets.load_dataset(kind, **options)):
        yield f"{path}, row {number}", row


def _json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file with one of them in each line, or with all of them in a list."""
    written = filter(lambda numbered: numbered[1].strip(), _lines(path))
    first = next(written, None)
    if first is None:
        return
    if "\0" in first[1]:
        raise ConversationError(
            f"`{path}` must be UTF-8 text, but it holds NUL bytes, as UTF-16 and packed files do. Save it as UTF-8, "
            "or give a packed file its ending, such as `.gz`."
        )

    rest: Iterable[tuple[int, str]] = written
    if isinstance(_value(first[1]), UnusableRowError):  # one value in many lines, or a broken line
        rest = list(written)
        whole = _value("".join([first[1], *(line for _, line in rest)]))
        if not isinstance(whole, UnusableRowError):
            yield from _spread(path, whole)
            return
        if len(first[1].strip()) == 1:
            raise ConversationError(f"`{path}`: {whole}")

    for number, line in chain([first], rest):
        yield from _spread(f"{path}, line {number}", _value(line))


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text, packed or not; what is no UTF-8 becomes an escape, which breaks its line only."""
    text = {"encoding": "utf-8-sig", "errors": "backslashreplace", "newline": "\n"}
    with fsspec.open(path, "rt", compression="infer", **text) as lines:
        yield from enumerate(lines, start=1)


def _spread(origin: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The rows of a value: those in a list, or the value itself."""
    if not isinstance(value, list) or _is_conversation(value) or not value:
        yield origin, value
        return
    for number, row in enumerate(value):
        yield f"{origin}, row {number}", row


def _value(text: str) -> Any:
    """What a JSON text says, or the error that it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = " (is the file UTF-8?)" if "escape" in str(error) else ""
        return UnusableRowError("no JSON", f"it must be JSON, but {short(error)}{hint}. Mend or delete it.")


# What a row means


def messages_of(row: Any, needs_answers: bool) -> tuple[str, list[Message]]:
    """The columns that a row is read from, in words, and its messages, at least one.

    Raises:
        [`UnusableRowError`]: the row is in no known form, or a message of it is not text by somebody known.
    """
    if isinstance(row, UnusableRowError):
        raise row
    form, given = _turns(row, needs_answers)
    return form, [_message(number, message) for number, message in enumerate(given, start=1)]


def _check_turns(messages: Sequence[Message], needs_answers: bool) -> None:
    """Check that there is something to learn, or to answer."""
    is_asked = not needs_answers and messages[-1]["role"] == "user"
    if not is_asked and not any(message["role"] == "assistant" for message in messages):
        raise UnusableRowError(
            "no assistant turn", "a row must have an assistant turn, for that is what the drafter learns; it has none."
        )
    if messages[0]["role"] == "assistant":
        raise UnusableRowError(
            "nothing before the first answer",
            "the assistant must have something to answer, but it has the first turn.",
        )

    for number, message in enumerate(messages, start=1):
        is_empty = not message["content"].strip() and not message.get("reasoning_content")
        if needs_answers and message["role"] == "assistant" and is_empty:
            raise UnusableRowError("an empty answer", f"message {number} of the assistant must say something.")


def _turns(row: Any, needs_answers: bool) -> tuple[str, list[Any]]:
    """The columns that a row is read from, in words, and its messages as they are given, at least one."""
    if _is_conversation(row):
        return "bare lists of messages", row
    if not isinstance(row, Mapping):
        raise UnusableRowError(
            "no messages", f"a row must be an object with a list `messages` or the like, but it is `{_kind(row)}`."
        )
    if row.get("tools") not in NO_TOOLS:
        raise UnusableRowError("tools", "a row must do without tools, but it has `tools`.")

    column = _first(row, CONVERSATIONS)
    question = _first(row, QUESTIONS)
    answer = _first(row, ANSWERS)
    if column is not None:
        columns: list[str] = [column]
        turns = _list(row[column], column)
        if all(isinstance(turn, str) for turn in turns):  # the user's and the assistant's, in turn
            roles = cycle(["user", "assistant"])
            turns = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    elif question is not None and (answer is not None or not needs_answers):
        columns = [question]
        turns = _as_turns(row, question, "user")
        if answer is not None:
            columns.append(answer)
            turns += _as_turns(row, answer, "assistant")
    elif "chosen" in row and "rejected" in row:
        raise UnusableRowError(
            "preference pairs",
            "a row must have one answer, but it has `chosen` and `rejected`. Rename the wanted one to `messages`.",
        )
    elif isinstance(row.get("text"), str):
        said = {"role": "assistant" if needs_answers else "user", "content": row["text"]}
        return "`text`", [{"role": "user", "content": ""}, said] if needs_answers else [said]
    else:
        names = [str(name)[:30] for name, value in list(row.items())[:8] if value is not None]
        empty = [str(name)[:30] for name, value in list(row.items())[:8] if value is None]
        held = f"it has {names}" + (f", and nothing in {empty}" if empty else "")
        raise UnusableRowError(
            "no messages",
            f"a row must hold a list `messages`, or columns such as `prompt` and `completion`, but {held}.",
        )

    system = _first(row, SYSTEMS)
    has_system = isinstance(turns[0], Mapping) and ROLES.get(str(_role(turns[0]))) == "system"
    if system is not None and row[system] and not has_system:
        turns = [{"role": "system", "content": row[system]}, *turns]
    return " and ".join(f"`{name}`" for name in columns), turns


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The first of the columns that holds something."""
    return next((name for name in columns if row.get(name) is not None), None)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and _role(value[0]) is not None


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role", message.get("from"))


def _kind(value: Any) -> str:
    return type(value).__name__


def _list(value: Any, column: str) -> list[Any]:
    """The turns in a column: a list, the JSON text of one, or columns."""
    if isinstance(value, str):
        value = _value(value)
    if isinstance(value, Mapping) and value and all(isinstance(part, list) for part in value.values()):
        value = _by_rows(value)
    if isinstance(value, list) and value:
        return value

    came = "a text that is no JSON" if isinstance(value, UnusableRowError) else f"`{_kind(value)}`"
    came = "an empty list" if value == [] else came
    raise UnusableRowError("no messages", f"`{column}` must be a list of messages, but it is {came}.")


def _as_turns(row: Mapping[str, Any], column: str, role: str) -> list[Any]:
    """The turns in a column that holds messages, or the text of one."""
    value = row[column]
    if _is_conversation(value):
        return list(value)
    addition = _first(row, [name for name in ADDITIONS if name != column]) if role == "user" else None
    if addition and isinstance(row[addition], str) and row[addition].strip():
        value = f"{value}\n\n{row[addition]}"
    return [{"role": role, "content": value}]


def _message(number: int, given: Any) -> Message:
    """A message without what is of no use here; parts that are all text are joined."""
    name = _role(given) if isinstance(given, Mapping) else None
    if name in TOOL_ROLES or (isinstance(given, Mapping) and (given.get("tool_calls") or given.get("function_call"))):
        raise UnusableRowError(
            "tools", f"a row must do without tools, but message {number} is of a tool or calls one."
        )

    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableRowError(
            "an unknown role",
            f"each message needs a `role`, one of {list(ROLES)}, but message {number} has {repr(name)[:30]}.",
        )

    content = given.get("content", given.get("value"))
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        if any(part.get("type") != "text" for part in content):
            raise UnusableRowError(
                "images or other parts",
                f"message {number} must be text alone, but it has parts of another kind, such as images.",
            )
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UnusableRowError(
            "no text", f"each message needs a text `content`, but that of message {number} is `{_kind(content)}`."
        )

    message = {"role": role, "content": content}
    thought = next((given[name] for name in THOUGHTS if given.get(name)), None)
    if role == "assistant" and isinstance(thought, str):
        message["reasoning_content"] = thought
    for key, text in message.items():
        check_whole(text, f"`{key}` of message {number}")
    return message


def check_whole(text: str, name: str) -> None:
    """Check that a text is made of whole characters: no tokenizer takes half of one, which UTF-16 cut off."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UnusableRowError(
            "half a character",
            f"{name} must be whole characters, but character {error.start} is half of one, {half}. Mend the text.",
        ) from None


def _prompt(row: Sequence[Message]) -> str:
    """What the user asks before the first answer; of a row that asks nothing, all of it."""
    asked = []
    for message in row:
        if message["role"] == "assistant":
            break
        if message["role"] == "user":
            asked.append(message["content"].strip())
    return json.dumps(asked if any(asked) else row)
