"""Results files of this package's commands into Markdown documents, between their markers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .speed_tables import speed
from .tables import calibration, parity

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def tables_of(path: Path) -> str | None:
    """The tables of a results file of `falcon-spec bench`, `parity` or `calibrate`; None if it is another file."""
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
    """Replace what stands between the markers of a document by tables.

    Raises:
        [`OptionError`]: the document lacks the markers.
    """
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise OptionError(f"`{document}` must hold the lines `{BEGIN}` and `{END}`; the tables go between them.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    joined = "\n\n".join(tables)
    document.write_text(f"{before}{BEGIN}\n{joined}\n{END}{after}", encoding="utf-8")
