"""Files of measurements: records, a line each, so that an interrupted run goes on, and results, which sum them up."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from ..errors import OptionError
from ..provenance import portable
from .methods import DECODINGS

Text = TypeVar("Text")
Result = dict[str, Any]
Row = dict[str, Any]


class Records:
    """The measurements in a file, which is made or continued; a last line that is cut short is removed.

    The first line of the file holds the `settings` that all measurements have in common.

    Raises:
        [`OptionError`]: the file holds measurements under other settings.
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
        self,
        texts: Mapping[Any, Text],
        measure: Callable[[Text], dict[str, Any]],
        key_of: Callable[..., Any],
        title: str,
    ) -> list[dict[str, Any]]:
        """The entries of `texts`, whose key is `key_of(entry)`; those that the file lacks are measured and stored."""
        found = {key_of(entry): entry for entry in self.entries}
        for key in tqdm([key for key in texts if key not in found], desc=title, unit="text"):
            found[key] = measure(texts[key])
            self.append(found[key])
        return [found[key] for key in texts]

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _complete_rows(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            self.path.write_bytes(complete)

        return list(map(json.loads, complete.splitlines()))


def read_result(path: Path) -> Result:
    """Read a results file of `falcon-spec bench`; other files are an [`OptionError`]."""
    must = f"`{path}` must be a results file of `falcon-spec bench`, but"
    if not path.is_file():
        raise OptionError(f"{must} there is no such file.")

    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        is_of_bench = {"provenance", "methods", "rows"} <= result.keys()
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{must} it is read with {type(error).__name__}: {error}. Measure again.") from None

    if not is_of_bench:
        raise OptionError(f"{must} it is another kind of file. Measure again.")

    return result


def failures(result: Result) -> list[Row]:
    """The methods that did not finish."""
    return [method for method in result["methods"] if method["failure"] is not None]


def is_complete(row: Row) -> bool:
    """Whether all runs that a row sums up were made."""
    return bool(row["num_runs"] == row["num_planned"])


def failure_of(result: Result, row: Row) -> str:
    """The reason why runs of a row are missing."""
    key = (row["target"], row["method"])
    for entry in failures(result):
        if (entry["target"], entry["method"]) == key:
            return str(entry["failure"]["text"])
    return f"{row['num_runs']} of {row['num_planned']} runs are there"


def changes_greedy_text(row: Row) -> bool:
    """Whether greedy decoding wrote other text than the target alone; sampling with a stock method may."""
    is_greedy = not DECODINGS[row["decoding"]]["do_sample"]
    return is_greedy and row.get("num_identical") != row.get("num_compared")
