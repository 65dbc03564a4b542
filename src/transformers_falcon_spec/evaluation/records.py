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
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
        is_of_bench = {"provenance", "methods", "rows"} <= result.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise OptionError(f"{must} it is read with {type(error).__name__}: {error}. Measure again.") from None

    if not is_of_bench:
        raise OptionError(f"{must} it is another kind of file. Measure again.")

    return result


def changes_greedy_text(row: Row) -> bool:
    """Whether greedy decoding wrote other text than the target alone; sampling with a stock method may."""
    is_greedy = not DECODINGS[row["decoding"]]["do_sample"]
    return is_greedy and row.get("num_identical") != row.get("num_compared")
