"""The reasons why weights cannot be loaded: files cut short, pointers of Git LFS, or missing files."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from .findings import BROKEN, TRUNCATED, Report

_POINTER = b"version https://git-lfs"


def add_unreadable(report: Report, name: str, error: Exception) -> None:
    """Add the fault of a checkpoint that could not be loaded because of `error`."""
    folder = folder_of(name)
    faults = [] if folder is None else file_faults(folder)
    if faults:
        remedy = "Fetch the files again; `git lfs pull` fetches what a pointer stands for."
        report.add(TRUNCATED, f"The weights of `{name}` are not whole: {'; '.join(faults)}.", remedy)
    else:
        remedy = "Take another checkpoint, or convert it if it is foreign."
        report.add(BROKEN, f"`{name}` cannot be loaded: {error}", remedy)


def file_faults(folder: Path) -> list[str]:
    """What is wrong with the safetensors files of a folder, as far as their headers show."""
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
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return f"`{path.name}` is a pointer of Git LFS"
    try:
        with safe_open(path, framework="pt"):
            return None
    except SafetensorError as error:
        return f"`{path.name}` is cut short, or no safetensors file, at {path.stat().st_size} bytes ({error})"


def folder_of(name: str) -> Path | None:
    """The folder of a checkpoint, given by path or by Hub name; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None
