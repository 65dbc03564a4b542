"""The reasons why weights cannot be loaded: files cut short, pointers of Git LFS, or missing files."""

import json
import struct
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from .findings import BROKEN, TRUNCATED, Finding

_POINTER = b"version https://git-lfs"
_LENGTH = 8  # bytes at the start of a file that hold the length of its header


def why_unreadable(name: str, error: Exception) -> Finding:
    """The fault of a checkpoint that could not be loaded because of `error`."""
    folder = folder_of(name)
    faults = [] if folder is None else file_faults(folder)
    if faults:
        remedy = "Fetch the files again; `git lfs pull` fetches what a pointer stands for."
        return Finding(TRUNCATED, f"The weights of `{name}` are not whole: {'; '.join(faults)}.", remedy)
    return Finding(
        BROKEN, f"`{name}` cannot be loaded: {error}", "Take another checkpoint, or convert it if it is foreign."
    )


def file_faults(folder: Path) -> list[str]:
    """What is wrong with the safetensors files of a folder, as far as the lengths in their headers show."""
    found = [fault for path in sorted(folder.glob("*.safetensors")) if (fault := _fault(path)) is not None]
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            found.append(f"`{index.name}` is no index")
            continue
        found += [f"`{shard}` is missing" for shard in sorted(shards) if not (folder / shard).is_file()]
    return found


def _fault(path: Path) -> str | None:
    """What is wrong with one safetensors file; None if nothing is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH + len(_POINTER))
        if start.startswith(_POINTER):
            return f"`{path.name}` is a pointer of Git LFS"
        if len(start) < _LENGTH:
            return f"`{path.name}` has {size} bytes and no header"
        (length,) = struct.unpack("<Q", start[:_LENGTH])
        if size < _LENGTH + length:
            return f"`{path.name}` ends after {size} bytes, within a header of {length}"
        file.seek(_LENGTH)
        return _fault_of_header(path.name, file.read(length), size)


def _fault_of_header(name: str, header: bytes, size: int) -> str | None:
    """What is wrong with a file of `size` bytes that begins with `header`; None if nothing is."""
    try:
        entries = json.loads(header)
    except ValueError:
        return f"`{name}` has a header that cannot be read"
    ends = [entry["data_offsets"][1] for part, entry in entries.items() if part != "__metadata__"]
    expected = _LENGTH + len(header) + max(ends, default=0)
    return f"`{name}` must have {expected} bytes, but it has {size}" if size < expected else None


def folder_of(name: str) -> Path | None:
    """The folder of a checkpoint, given by path or by Hub name; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None
