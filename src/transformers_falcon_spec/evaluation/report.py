"""Writes the results of this package's commands into Markdown documents, between their markers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .speed_tables import speed
from .tables import calibration, parity

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def tables_of(path: Path) -> str | None:
    """The tables of a results file of `falcon-spec bench`, `parity` or `calibrate`; None for other files."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
        row = result["rows"][0] if "provenance" in result else {}
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None
    if "fits_of_folds" in result:
        return f"### Calibration: {path.stem}\n\n{calibration(result, path.as_posix())}"
    if "bug" in row:
        return parity(result, path.as_posix(), path.stem)
    return speed(result, path.as_posix()) if "acceptance_histogram" in row else None


def write_between_markers(document: Path, tables: Iterable[str]) -> None:
    """Replace the text between the markers of a document by tables.

    Raises:
        [`OptionError`]: the document lacks the markers.
    """
    lines = document.read_text(encoding="utf-8").split("\n")
    if BEGIN not in lines or END not in lines[lines.index(BEGIN) :]:
        raise OptionError(f"`{document}` must hold the lines `{BEGIN}` and `{END}`; the tables go between them.")
    begin = lines.index(BEGIN)
    end = lines.index(END, begin)
    document.write_text("\n".join([*lines[: begin + 1], "\n\n".join(tables), *lines[end:]]), encoding="utf-8")
