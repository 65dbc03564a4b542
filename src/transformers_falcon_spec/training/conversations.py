"""Reading conversations from JSON lines files or from `datasets`.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}`.
A row that cannot be used is left out and reported as a `ConversationError`; the other rows are read all the same.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ConversationError

logger = logging.getLogger(__name__)

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ConversationSet:
    """The conversations that were read, each once, and what was left out."""

    rows: list[list[Message]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # of each row: file and line, or data set and row
    errors: list[ConversationError] = field(default_factory=list)  # one for each broken row
    duplicates: list[str] = field(default_factory=list)  # origins of exact copies of earlier conversations


def read_conversations(sources: str | Path | Sequence[str | Path], limit: int | None = None) -> ConversationSet:
    """Read conversations from all sources; broken rows and duplicates are left out with a warning.

    Args:
        sources (`str`, `Path` or a list of them):
            Files ending in `.jsonl` or `.jsonl.gz`, or names for `datasets.load_dataset` (`name` or `name:split`).
        limit (`int`, *optional*):
            Stop after this many conversations, not counting duplicates.

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
            messages = _messages(row)
        except ConversationError as error:
            found.errors.append(ConversationError(f"{origin}: {error}"))
            logger.warning("Left out: %s", found.errors[-1])
            continue
        key = hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()
        if key in seen:
            found.duplicates.append(origin)
        else:
            seen.add(key)
            found.rows.append(messages)
            found.origins.append(origin)
    if found.duplicates:
        logger.warning("Left out: %d conversations that are the same as an earlier one.", len(found.duplicates))
    if not found.rows:
        raise ConversationError(
            f"At least one usable conversation is needed, but {[str(path) for path in paths]} gave none "
            f"({len(found.errors)} rows were left out). Give files of "
            '`{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}` lines.'
        )
    return found


def _rows_with_origins(source: str | Path) -> Iterator[tuple[str, Any]]:
    """The origin and the content of each row: the bytes of a line, or a mapping from `datasets`."""
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


def _messages(row: Any) -> list[Message]:
    """The messages of a row, after checking them."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise ConversationError(f"the line must be JSON, but {error}. Mend or delete the line.") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConversationError("a row must be an object with a list `messages`; it has none.")
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            raise ConversationError(f"each message needs a `role` of {ROLES} and a text `content`.")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConversationError("a row must have an assistant turn, for that is what the drafter learns; it has none.")
    if messages[0]["role"] == "assistant":
        raise ConversationError("the assistant must have something to answer, but it has the first turn.")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
