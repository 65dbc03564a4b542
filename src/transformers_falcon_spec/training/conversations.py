"""Reading conversations from JSON lines files or from `datasets`.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}`. A thought of the assistant stands in its `content`,
between `<think>` and `</think>`, or beside it as `reasoning_content`.
A row that cannot be used is left out and reported as a `ConversationError`; the other rows are read all the same.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConversationError
from .chat_template import Message
from .dataset import ConversationDataset
from .row_encoding import NUM_NAMED, UnusableRowError, describe_rows

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
TOOL_ROLES = ("tool", "function", "ipython")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which rows hold thoughts


@dataclass(frozen=True)
class ConversationSet:
    """The conversations that were read, each once, and what was left out."""

    rows: list[list[Message]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each row: file and line, or data set and row
    errors: list[ConversationError] = field(default_factory=list)  # one for each broken row
    duplicates: list[str] = field(default_factory=list)  # origins of exact copies of earlier conversations
    reasons: Counter[str] = field(default_factory=Counter)  # why rows were left out: how many for each reason

    def split(self, held_out: Collection[int]) -> "tuple[ConversationSet, ConversationSet]":
        """The set without the rows at `held_out`, and one of these; only the first says what was left out."""
        parts = [[each for each in range(len(self.rows)) if (each in held_out) is wanted] for wanted in (False, True)]
        rest, out = (([self.rows[i] for i in part], [self.origins[i] for i in part]) for part in parts)
        return replace(self, rows=rest[0], origins=rest[1]), ConversationSet(*out)

    def leave_out(self, origin: str, error: UnusableRowError) -> None:
        """Count a row that cannot be used; the log names the first ones for each reason."""
        self.errors.append(ConversationError(f"{origin}: {error}"))
        self.reasons[error.reason] += 1
        if self.reasons[error.reason] <= NUM_NAMED:
            logger.warning("Left out: %s", self.errors[-1])

    def encoded(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, template_kwargs: Mapping[str, Any] | None = None
    ) -> ConversationDataset:
        """The examples of the conversations."""
        return ConversationDataset(self.rows, tokenizer, max_length, self.origins, template_kwargs, self.reasons)

    def log_totals(self) -> None:
        """Log how many rows were left out for the reasons of which not every row was named."""
        for reason, number in self.reasons.items():
            if number > NUM_NAMED:
                logger.warning("Left out: %d rows in all: %s.", number, reason)
        if self.duplicates:
            logger.warning("Left out: %d conversations that are the same as an earlier one.", len(self.duplicates))
            self.reasons["a copy of an earlier one"] = len(self.duplicates)


def read_conversations(
    sources: str | Path | Sequence[str | Path], limit: int | None = None, needs_answers: bool = True
) -> ConversationSet:
    """Read conversations from all sources; broken rows and duplicates are left out with a warning.

    Args:
        sources (`str`, `Path` or a list of them):
            Files ending in `.jsonl` or `.jsonl.gz`, or names for `datasets.load_dataset` (`name` or `name:split`). A
            list may also hold data sets that are already loaded.
        limit (`int`, *optional*):
            Stop after this many conversations, not counting duplicates.
        needs_answers (`bool`):
            Leave rows out that have no assistant turn. Otherwise they must end with a question, which `regenerate`
            answers.

    Returns:
        [`ConversationSet`]: the conversations, and what was left out.

    Raises:
        [`ConversationError`]: a source does not exist, or none of its rows can be used.
    """
    paths = [sources] if isinstance(sources, str | Path) else list(sources)
    found, seen = ConversationSet(), set[bytes]()
    for origin, row in chain.from_iterable(map(_rows_with_origins, paths)):
        if limit is not None and len(found.rows) >= limit:
            break
        try:
            messages = _messages(row, needs_answers)
        except UnusableRowError as error:
            found.leave_out(origin, error)
            continue
        key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()
        if key in seen:
            found.duplicates.append(origin)
        else:
            seen.add(key)
            found.rows.append(messages)
            found.origins.append(origin)
    found.log_totals()
    if not found.rows:
        raise ConversationError(
            f"At least one usable conversation is needed, but {[str(path) for path in paths]} gave none "
            f"({describe_rows(found.reasons)}). Give files of "
            '`{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}` lines.'
        )
    return found


def _rows_with_origins(source: Any) -> Iterator[tuple[str, Any]]:
    """The origin and the content of each row: the bytes of a line, or a mapping from `datasets`."""
    if not isinstance(source, str | Path):
        return ((f"row {number}", row) for number, row in enumerate(source))
    is_file = Path(source).name.endswith((".jsonl", ".jsonl.gz"))
    return _lines(Path(source)) if is_file else _hub_rows(str(source))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    if not path.is_file():
        raise ConversationError(f"The data file `{path}` does not exist. Give the path of a .jsonl or .jsonl.gz file.")
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:  # as bytes, a line that is not UTF-8 does not break the others
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise ConversationError(
            f"The data file `{path}` must be readable to its end, but {error}. Fetch it anew."
        ) from error


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset  # noqa: PLC0415  reading local files needs no `datasets`

    dataset_id, _, split = name.partition(":")
    try:
        rows = load_dataset(dataset_id, split=split or "train")
    except (OSError, ValueError) as error:
        raise ConversationError(
            f"`{name}` must be a .jsonl or .jsonl.gz file or a dataset that `datasets` can load, but it says: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row


def _messages(row: Any, needs_answers: bool) -> list[Message]:
    """The messages of a row, after checking them."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            text = f"the line must be JSON, but {error}. Mend or delete the line."
            raise UnusableRowError("no JSON", text) from None
    given = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(given, list) or not given:
        raise UnusableRowError("no messages", "a row must be an object with a list `messages`; it has none.")
    if row.get("tools"):
        raise UnusableRowError("tools", "a row must do without tools, but it has `tools`.")
    messages = list(map(_message, given))
    is_asked = not needs_answers and messages[-1]["role"] == "user"
    if not is_asked and not any(message["role"] == "assistant" for message in messages):
        text = "a row must have an assistant turn, for that is what the drafter learns; it has none."
        raise UnusableRowError("no assistant turn", text)
    if messages[0]["role"] == "assistant":
        text = "the assistant must have something to answer, but it has the first turn."
        raise UnusableRowError("nothing before the first answer", text)
    return messages


def _message(given: Any) -> Message:
    """A message without what is of no use here; parts that are all text are joined."""
    role = given.get("role") if isinstance(given, dict) else None
    if role in TOOL_ROLES or (isinstance(given, dict) and (given.get("tool_calls") or given.get("function_call"))):
        raise UnusableRowError("tools", f"a row must do without tools, but it has a turn of the {role} with some.")
    if role not in ROLES:
        raise UnusableRowError("an unknown role", f"each message needs a `role` of {ROLES}, but it has {role!r}.")
    content = given.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if any(part.get("type") != "text" for part in content):
            text = "a message must be text alone, but it has parts of another kind, such as images."
            raise UnusableRowError("images or other parts", text)
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UnusableRowError("no text", f"each message needs a `role` of {ROLES} and a text `content`.")
    thought = next((given[name] for name in THOUGHTS if given.get(name)), None)
    has_thought = role == "assistant" and isinstance(thought, str)
    return {"role": role, "content": content, **({"reasoning_content": thought} if has_thought else {})}
