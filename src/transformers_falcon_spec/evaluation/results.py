"""Reads results files of `bench`, `parity` and `calibrate`, and finds failures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import OptionError
from .decoding import DECODINGS

Result = dict[str, Any]
Row = dict[str, Any]
Kind = Literal["bench", "parity", "calibrate"]  # the command that wrote a file


def read_result(path: Path, kinds: Sequence[Kind] = ("bench",)) -> Result:
    """Read a results file of one of `kinds`; other files are an [`OptionError`]."""
    must = f"`{path}` must be a results file of {' or '.join(f'`falcon-spec {kind}`' for kind in kinds)}, but"
    if not path.is_file():
        raise OptionError(f"{must} there is no such file.")
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        if kind_of(result) not in kinds:
            raise ValueError("another kind of file")
        return result
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise OptionError(f"{must} it is read with {type(error).__name__}: {error}. Measure again.") from None


def kind_of(result: Result) -> Kind | None:
    """The command that wrote a result; None if none did."""
    if "provenance" not in result or "rows" not in result:
        return None
    row: Row = next(iter(result["rows"]), {})  # there is none where no method of `bench` finished
    if "methods" in result:
        return "bench"
    if row and "fits_of_folds" in result:
        return "calibrate"
    return "parity" if "bug" in row else None


def failures(result: Result) -> list[Row]:
    """The methods that did not finish."""
    return [method for method in result["methods"] if method["failure"] is not None]


def is_complete(row: Row) -> bool:
    """Whether all runs that a row sums up were made."""
    return bool(row["num_runs"] == row["num_planned"])


def failure_of(result: Result, row: Row) -> str:
    """The reason why runs of a row are missing."""
    key = (row["target"], row["method"])
    found = [entry["failure"]["text"] for entry in failures(result) if (entry["target"], entry["method"]) == key]
    return found[0] if found else f"{row['num_runs']} of {row['num_planned']} runs are there"


def changes_greedy_text(row: Row) -> bool:
    """Whether greedy decoding wrote other text than the target alone; sampling with a stock method may."""
    is_greedy = not DECODINGS[row["decoding"]]["do_sample"]
    return is_greedy and row.get("num_identical") != row.get("num_compared")
