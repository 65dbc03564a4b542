"""Files of work that is done piece by piece: a line for each piece, so that an interrupted run goes on."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from .errors import OptionError
from .provenance import portable

Text = TypeVar("Text")
_BEGINNING = b'{"settings": '  # of every file


def texts_of(prompts: Sequence[Any], decodings: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """What to write: a decoding and a prompt, by decoding, and set, id and digest of the prompt."""
    found = {}
    for decoding in decodings:
        for prompt in prompts:
            key = (decoding, prompt.set_name, prompt.prompt_id, prompt.digest)
            found["|".join(key)] = (decoding, prompt)

    return found


class Records:
    """The measurements in a file, which is made or continued; a last line that is cut short is removed.

    The first line of the file holds the `settings` that all measurements have in common. A file that begins
    otherwise is left as it is.

    Raises:
        [`OptionError`]: the file holds measurements under other settings, or something else.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        settings = portable(settings)
        self.path = path
        self.entries: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._complete_rows()
        if not rows:
            self._write({"settings": settings})
            return

        if portable(rows[0].get("settings")) != settings:
            raise OptionError(
                f"`{path}` must hold measurements under the same settings, {settings}, but it was begun with "
                f"{rows[0].get('settings')}. Delete it, or write to another file."
            )

        self.entries = rows[1:]

    def append(self, entry: dict[str, Any]) -> None:
        """Store one more measurement; it is on the disk when this returns."""
        self.entries.append(entry)
        self._write(entry)

    def measured(
        self, texts: Mapping[str, Text], measure: Callable[[Text], dict[str, Any]], title: str
    ) -> list[dict[str, Any]]:
        """The entries of `texts`, each with the key of its text; those that the file lacks are measured and stored."""
        found = {entry.get("key"): entry for entry in self.entries}
        for key in tqdm([key for key in texts if key not in found], desc=title, unit="text"):
            found[key] = {"key": key, **measure(texts[key])}
            self.append(found[key])

        return [found[key] for key in texts]

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _complete_rows(self) -> list[dict[str, Any]]:
        data = self.path.read_bytes() if self.path.is_file() else b""
        if data[: len(_BEGINNING)] != _BEGINNING[: len(data)]:  # of which less is there if it was cut short
            raise OptionError(
                f"`{self.path}` must be new or hold measurements, which are kept there, but it holds something else. "
                "It stays as it is: write to another file."
            )

        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            os.truncate(self.path, len(complete))

        rows = []
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise OptionError(
                    f"Each line of `{self.path}` must be JSON, but line {number} is not: {error}. Take it out: what "
                    "it held is measured again."
                ) from error

        return rows
