"""Files of an n-gram proxy: the counts as safetensors, and a description with their checksum."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import CheckpointError
from ...provenance import file_sha256
from .ngram_counts import NgramCounts

COUNTS_FILE, DESCRIPTION_FILE = "ngram_proxy.safetensors", "ngram_proxy.json"
VERSION = 1
_REMEDY = "Fetch the proxy again, or fit and save it again."


def write_ngrams(folder: Path, ngrams: list[NgramCounts], vocab_size: int) -> None:
    """Write n-grams of 1 token and more; the description comes last, so that what is not finished cannot be read."""
    tensors: dict[str, Tensor] = {}
    for length, found in enumerate(ngrams, start=1):
        tensors[f"keys.{length}"], tensors[f"counts.{length}"] = found.to_tensors()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    save_file(tensors, folder / COUNTS_FILE)
    described = {
        "version": VERSION,
        "order": len(ngrams),
        "vocab_size": vocab_size,
        "sha256": file_sha256(folder / COUNTS_FILE),
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def read_ngrams(folder: Path) -> tuple[list[NgramCounts], int]:
    """The n-grams of 1 token and more, and the size of the vocabulary.

    Raises:
        [`CheckpointError`]: a file is missing, cut short, changed, or of another version.
    """
    described = _description(folder)
    path = folder / COUNTS_FILE
    try:
        found = file_sha256(path)
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"`{path}` must be a whole safetensors file, but it is not: {error}. {_REMEDY}"
        ) from error
    if found != described["sha256"]:
        raise CheckpointError(
            f"`{path}` must have the checksum {described['sha256']} of `{DESCRIPTION_FILE}`, but it has {found}. "
            f"{_REMEDY}"
        )
    vocab_size = described["vocab_size"]
    lengths = range(1, described["order"] + 1)
    pairs = [(tensors[f"keys.{length}"], tensors[f"counts.{length}"]) for length in lengths]
    return [NgramCounts.of_tensors(keys, counts, vocab_size) for keys, counts in pairs], vocab_size


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION_FILE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"`{path}` must hold a JSON object, but it cannot be read: {error}. {_REMEDY}"
        ) from error
    kinds = {"version": int, "order": int, "vocab_size": int, "sha256": str}
    if not isinstance(described, dict) or any(type(described.get(name)) is not kind for name, kind in kinds.items()):
        raise CheckpointError(
            f"`{path}` must be an object with {sorted(kinds)}, but it is {described!r:.200}. {_REMEDY}"
        )
    if described["version"] != VERSION:
        raise CheckpointError(
            f"`{path}` must be of version {VERSION}, but it is of version {described['version']}. Fit and save the "
            "proxy again, or take the version of this package that wrote it."
        )
    return described


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(
        f"A proxy must have both `{COUNTS_FILE}` and `{DESCRIPTION_FILE}`, but `{path}` is not there. {_REMEDY}"
    )
