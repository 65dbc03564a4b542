"""Results files of `falcon-spec bench`, read by what shows them."""

import json
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .methods import DECODINGS

Result = dict[str, Any]
Row = dict[str, Any]


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
