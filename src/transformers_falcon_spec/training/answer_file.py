"""Files of answered conversations: what stands in them, how far they are, and why rows are missing or cut short.

Lines are written as answers come, and put into the order of the rows at the end. Beside the file stands how it was
begun, so that a run that was interrupted goes on with the rows that have no line yet, and with nothing else.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FalconSpecError, OptionError
from ..provenance import portable
from .answers import Reply
from .chat_template import Message
from .conversations import check_whole
from .row_encoding import UnusableRowError

logger = logging.getLogger(__name__)
NUM_BEGINNING = 40  # letters at the end of a prompt, with which an answer may begin

CUT = "an answer that was cut at `max_new_tokens`"
CUT_THOUGHT = "a thought that was cut at `max_new_tokens`"
EMPTY = "an empty answer"


@dataclass
class Answered:
    """A conversation with the answers that it got so far."""

    messages: list[Message] = field(default_factory=list)
    ending: str = ""  # why no further turn is answered
    error: FalconSpecError | None = None  # because of which the conversation is asked about again

    @property
    def goes_on(self) -> bool:
        """Whether a further turn may be answered."""
        return not self.ending and self.error is None

    def add(self, opening: list[Message], reply: Reply, prompt: str) -> None:
        """Add a turn and its answer, unless this is empty, or cut within a thought, which the `prompt` may begin."""
        _, begin, thought = (prompt[-NUM_BEGINNING:] + reply.text).rpartition("<think>")
        is_thinking = not reply.text.strip() if reply.thought else begin and "</think>" not in thought
        if not reply.is_complete:
            self.ending = CUT_THOUGHT if is_thinking else CUT
        elif not reply.text.strip() and not reply.thought:
            self.ending = EMPTY
        try:
            check_whole(reply.text + reply.thought, "the answer")
        except UnusableRowError as error:
            self.ending = error.reason

        if self.ending in ("", CUT):
            kept_apart = {"reasoning_content": reply.thought} if reply.thought else {}
            self.messages += [*opening, {"role": "assistant", "content": reply.text, **kept_apart}]

    def line(self, row: int, name: Any = None) -> str:
        """The line of the file for the conversation with this number, and with this `id` if it has one."""
        entry = {"row": row, "id": name, "messages": self.messages, "ended_by": self.ending or None}
        given = {key: value for key, value in entry.items() if value is not None}
        return json.dumps(given, ensure_ascii=False) + "\n"


def openings_of(row: list[Message]) -> list[list[Message]]:
    """For each assistant turn the messages since the one before; a question at the end is to be answered, too."""
    openings: list[list[Message]] = [[]]
    for message in row:
        if message["role"] == "assistant":
            openings.append([])
        else:
            openings[-1].append(message)
    has_question = bool(openings[-1]) and openings[-1][-1]["role"] == "user"
    return openings if has_question else openings[:-1]


def hash_of(value: Any) -> str:
    """A short hash of what JSON can say."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


class AnswerFile:
    """A file of answers that is begun, or gone on with.

    Args:
        path (`Path`): The JSON lines file.
        settings (`dict`): What all answers of the file must share.

    Raises:
        [`OptionError`]: the file was begun with other settings, or by somebody else, or cannot be written, or what
            stands beside it is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(portable(dict(settings))))
        self._progress_path = path.with_name(path.name + ".progress.json")
        self.left_out, num_written = self._progress()  # rows without a line, by reason
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._save(num_written)  # before the file, so that a file without progress is not ours
            path.touch()
            lines = self._lines()
            self._write_lines(lines)  # without one that was being written when a run was killed

        self.rows = set(lines)  # that have a line
        if num_written > len(lines):
            num_lost = num_written - len(lines)
            logger.warning("%d conversations that were in `%s` are lost: they are answered again.", num_lost, path)

    @property
    def done(self) -> set[int]:
        """The rows that have a line, or are left out."""
        return self.rows.union(*self.left_out.values())

    def add(self, lines: Mapping[int, str], left_out: Mapping[int, str]) -> None:
        """Write the lines of rows at once, and note the reasons why others have none."""
        for row, reason in left_out.items():
            self.left_out.setdefault(reason, []).append(row)
        self.rows |= lines.keys()
        with _explained(self.path):
            with self.path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write("".join(lines.values()))
            self._save(len(self.rows))

    def finish(self) -> list[dict[str, Any]]:
        """Put the lines into the order of the rows; returns what they hold."""
        lines = dict(sorted(self._lines().items()))
        with _explained(self.path):
            self._write_lines(lines)
        return [json.loads(line) for line in lines.values()]

    def _progress(self) -> tuple[dict[str, list[int]], int]:
        """The rows that earlier runs left out, by reason, and how many lines they wrote."""
        if not self._progress_path.exists():
            if self.path.exists():
                raise OptionError(
                    f"`{self.path}` exists but was not begun by `regenerate`. Delete it or write to another file."
                )
            return {}, 0
        try:
            progress = json.loads(self._progress_path.read_bytes())
            begun = dict(progress["options"])
            left_out, num_written = dict(progress["left_out"]), int(progress["num_written"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise OptionError(
                f"`{self._progress_path}` must say how `{self.path.name}` was begun, but it is damaged "
                f"({type(error).__name__}: {error}). Delete both files, or write to another one."
            ) from None

        names = sorted({*begun, *self.settings})
        then = {name: begun.get(name) for name in names if begun.get(name) != self.settings.get(name)}
        if then:
            now = {name: self.settings.get(name) for name in then}
            raise OptionError(
                f"`{self.path}` was begun with {then}, but the options now are {now}. Go on with the old options and "
                "data, or write to another file."
            )
        logger.info("%s: going on after %d conversations.", self.path, num_written)
        return left_out, num_written

    def _lines(self) -> dict[int, bytes]:
        """The lines by row; those that are damaged are not among them."""
        found = {}
        for line in self.path.read_bytes().split(b"\n"):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry["row"], int) and isinstance(entry["messages"], list):
                    found[entry["row"]] = line
        return found

    def _write_lines(self, lines: Mapping[int, bytes]) -> None:
        _replace(self.path, b"".join(line + b"\n" for line in lines.values()))

    def _save(self, num_written: int) -> None:
        progress = {"options": self.settings, "left_out": self.left_out, "num_written": num_written}
        _replace(self._progress_path, json.dumps(progress).encode())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of writing in words."""
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"`{path}` must be a file that can be written, but {error}. Make room or name another; what is "
            "answered so far is kept, and the same command goes on from there."
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Replace a file at once, so that an interruption leaves the old one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(content)
    fresh.replace(path)
