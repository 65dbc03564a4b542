"""Metrics for `evaluate.load`: a folder for each, which holds a module of the same name."""

from collections.abc import Sized
from pathlib import Path

from ...errors import OptionError

FOLDER = Path(__file__).parent
METRICS = ("acceptance", "speedup", "token_parity")


def metric_path(name: str) -> str:
    """Where `evaluate.load` finds a metric of this package.

    Raises:
        [`OptionError`]: there is no such metric.

    Example:

    ```python
    >>> Path(metric_path("speedup")).name
    'speedup'

    ```
    """
    if name not in METRICS:
        raise OptionError(
            f"A metric must be one of {', '.join(f'`{known}`' for known in METRICS)}, but it is `{name}`."
        )
    return str(FOLDER / name)


def require_rows(column: Sized) -> None:
    """Refuse an empty column, of which no rate can be computed: [`OptionError`]."""
    if not len(column):
        raise OptionError("A metric must be computed over at least one row, but there is none.")
