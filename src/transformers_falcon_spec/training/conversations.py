"""Conversations from JSON lines files or a `datasets` name: `{"messages": [{"role": ..., "content": ...}]}` a row.

Knows nothing of tokens. A row that cannot be used becomes a `ConversationError` beside the good rows, never instead of
them.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConversationError

logger = logging.getLogger(__name__)

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ConversationSet:
    """What was read: the good rows, each once, and what was left out.

    Args:
        rows (`list[list[dict]]`): The messages of each conversation.
        origins (`list[str]`): Where each of them comes from: file and line, or data set and row.
        errors (`list[ConversationError]`): One for each broken row.
        duplicates (`list[str]`): Where those come from that are the same, letter for letter, as an earlier one.
    """

    rows: list[list[Message]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    errors: list[ConversationError] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)


def read_conversations(sources: str | Path | Sequence[str | Path], limit: int | None = None) -> ConversationSet:
    """Read every source and leave out, with a warning, the rows that are broken or there already.

    Args:
        sources (`str`, `Path` or a list of them):
            Files ending in `.jsonl` or `.jsonl.gz`, or names for `datasets.load_dataset` (`name` or `name:split`).
        limit (`int`, *optional*):
            Stop after this many good rows, duplicates not counted.

    Returns:
        [`ConversationSet`]: the rows, and what was left out.

    Raises:
        [`ConversationError`]: a source does not exist or not one row could be used.
    """
    paths = [sources] if isinstance(sources, str | Path) else list(sources)
    found = _read(paths, limit)
    if found.duplicates:
        logger.warning("Left out: %d conversations that are the same as an earlier one.", len(found.duplicates))
    if not found.rows:
        raise ConversationError(
            f"At least one usable conversation is needed, but {[str(path) for path in paths]} gave none "
            f"({len(found.errors)} rows were left out). Give files of "
            '`{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}` lines.'
        )
    return found


def _read(paths: list[str | Path], limit: int | None) -> ConversationSet:
    found = ConversationSet()
    seen: set[bytes] = set()
    for where, row in _located_rows(paths):
        if limit is not None and len(found.rows) >= limit:
            break
        try:
            messages = _messages(row, where)
        except ConversationError as error:
            found.errors.append(error)
            logger.warning("Left out: %s", error)
            continue
        key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()
        if key in seen:
            found.duplicates.append(where)
        else:
            seen.add(key)
            found.rows.append(messages)
            found.origins.append(where)
    return found


def _located_rows(sources: Iterable[str | Path]) -> Iterator[tuple[str, Any]]:
    """Pairs of a row's place and its content: the bytes of a line, or a mapping from `datasets`."""
    for source in sources:
        path = Path(source)
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _lines(path)
        else:
            yield from _hub_rows(str(source))


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    if not path.is_file():
        raise ConversationError(f"The data file `{path}` does not exist. Give the path of a .jsonl or .jsonl.gz file.")
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:  # bytes end at a line feed alone, and a broken one harms its own line alone
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


def _messages(row: Any, where: str) -> list[Message]:
    """The row's messages, checked."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise ConversationError(f"{where}: the line must be JSON, but {error}. Mend or delete the line.") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConversationError(f"{where}: a row must be an object with a list `messages`; it has none.")
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            raise ConversationError(f"{where}: each message needs a `role` of {ROLES} and a text `content`.")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConversationError(
            f"{where}: a row must have an assistant turn, for that is what the drafter learns; it has none."
        )
    if messages[0]["role"] == "assistant":
        raise ConversationError(f"{where}: the assistant must have something to answer, but it has the first turn.")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
