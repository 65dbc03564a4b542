"""Where code makes the host wait for a CUDA device, found without forbidding it to other threads."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_WARNING = "called a synchronizing"  # what PyTorch says of an operation for which the host waits
_ABOUT_ITSELF = "Synchronization debug mode"  # what it says of its detector


@contextmanager
def host_waits() -> Iterator[dict[str, None]]:
    """Inside, note where this thread waits for the device: files and lines, in order.

    PyTorch's detector belongs to the whole process, and can warn or raise. It warns here, for an error would also end
    what other threads do meanwhile.
    """
    places: dict[str, None] = {}
    own_thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        if _WARNING not in str(message):
            show(message, category, filename, lineno, *more)
        elif threading.get_ident() == own_thread:
            places["/".join(Path(filename).parts[-2:]) + f":{lineno}"] = None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ABOUT_ITSELF)
        warnings.filterwarnings("always", _WARNING)
        warnings.showwarning = note  # type: ignore[assignment]  # any further arguments are passed on
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            warnings.showwarning = show
