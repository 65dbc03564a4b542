"""Reading a foreign checkpoint from a folder or the Hub: its config, and its weights without running any code."""

import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..provenance import file_sha256
from .formats import refuse
from .table import Checkpoint
from .vocabulary import SENTENCEPIECE, TOKENIZER_FILES, existing, mask_id_of, read_object

CONFIG_FILE = "config.json"
# In order of preference: safetensors, which cannot hold code, come before pickles.
WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
INDEX_FILES = tuple(name for name in WEIGHT_FILES if name.endswith(".json"))
SHARDS = ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin")
_TOKENS = (*TOKENIZER_FILES, SENTENCEPIECE)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_UNREADABLE = (
    *(pickle.UnpicklingError, SafetensorError, EOFError, OSError),
    *(RuntimeError, ValueError, LookupError, AttributeError),
)
INTEGERS = (torch.int64, torch.int32, torch.bool)  # maps between vocabularies


def read_checkpoint(source: str, revision: str | None = None, target: PreTrainedModel | None = None) -> Checkpoint:
    """Read config and weights from a folder, or from a Hub repository, of which no code is fetched.

    Config and index are read first. If they show that nothing can be converted, weights are neither fetched nor read.
    """
    is_local = Path(source).exists()
    folder = Path(source) if is_local else _fetched(source, [CONFIG_FILE, *INDEX_FILES, *_TOKENS], revision)
    if not folder.is_dir():
        raise CheckpointError(f"`SOURCE` must be a folder or a Hub id, but `{source}` is a file. Give its folder.")
    config = _convertible_config(folder)

    if not is_local:
        folder = _fetched(source, [CONFIG_FILE, *WEIGHT_FILES, *SHARDS, *_TOKENS], revision)
    paths = _weight_paths(folder)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= _read_tensors(path)
    _check_values(tensors, source)

    return Checkpoint(source, config, tensors, _digests(folder, paths), folder, target)


def contents_of(source: str, revision: str | None = None) -> str:
    """Identify what a checkpoint holds: the commit on the Hub, or the digests of the files in a folder."""
    if not Path(source).exists():
        return _fetched(source, [CONFIG_FILE, *INDEX_FILES], revision).name
    folder = Path(source)
    _convertible_config(folder)
    return str(_digests(folder, _weight_paths(folder)))


def _digests(folder: Path, weights: list[Path]) -> dict[str, str]:
    """The SHA-256 of every file that is read, by name."""
    paths = [folder / CONFIG_FILE, *weights, *existing(folder, TOKENIZER_FILES)]
    return {path.name: file_sha256(path) for path in paths}


def _convertible_config(folder: Path) -> dict[str, Any]:
    """The config, with the mask that the tokenizer names; what it or an index shows to be of no use is refused."""
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"`{folder}` must hold a `{CONFIG_FILE}`, which says what the weights are, but it does not. Take it from "
            "where the weights come from."
        )
    config = read_object(folder / CONFIG_FILE)
    refuse(config)

    mask = mask_id_of(folder) if config.get("mask_token_id") is None else None
    if mask is not None:
        config["mask_token_id"] = mask
    for index in existing(folder, INDEX_FILES):
        refuse(config, _weight_map(index))
    return config


def _fetched(name: str, patterns: list[str], revision: str | None) -> Path:
    """Fetch the files that match `patterns` from the Hub, and return their folder."""
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, revision=revision))
    except (HFValidationError, OSError) as error:
        raise CheckpointError(
            f"`SOURCE` must be a folder or a Hub id, but there is no folder `{name}`, and the Hub gives nothing for "
            f"that id: {error} Check the name and the connection."
        ) from error


def _weight_paths(folder: Path) -> list[Path]:
    """The files of the weights; of several kinds the first in `WEIGHT_FILES` is taken."""
    found = existing(folder, WEIGHT_FILES)
    if not found:
        seen = sorted(path.name for path in folder.iterdir())
        raise CheckpointError(f"`{folder}` must hold weights in one of {WEIGHT_FILES}, but it holds {seen}.")
    first = found[0]
    if first.name not in INDEX_FILES:
        return [first]

    names = sorted(set(_weight_map(first).values()))
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (folder / name).is_file()]
    if outside or missing:
        raise CheckpointError(
            f"`{first}` must name files beside it, but {outside or missing} "
            f"{'lie elsewhere' if outside else 'are not there'}. Fetch the whole checkpoint."
        )
    return existing(folder, names)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index}` must name the file of every weight under `weight_map`, but it does not.")
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a `.safetensors`, `.bin` or `.pt` file; a pickle that needs code to be run is refused."""
    try:
        is_safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = " ".join(str(error).partition("WeightsUnpickler error:")[2].split() or str(error).split())[:200]
        raise CheckpointError(
            f"`{path}` must be a whole file of weights, but it cannot be read ({reason or type(error).__name__}): it "
            "is cut short or damaged, or a pickle that would run code, of which nothing was run. Fetch it again, or "
            "ask for the weights as safetensors."
        ) from error

    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"`{path}` must hold tensors by name, but it holds something else. Save the state dict alone: "
            "`torch.save(model.state_dict(), ...)`."
        )
    return content


def _check_values(tensors: dict[str, Tensor], name: str) -> None:
    """Check that all weights are finite numbers of a plain dtype, so not quantised."""
    for key, value in tensors.items():
        if value.dtype not in (*FLOATS, *INTEGERS):
            raise CheckpointError(
                f"The weights of `{name}` must be plain floating point numbers, but `{key}` is of {value.dtype}. Take "
                "the checkpoint that was not quantised."
            )

        if not value.isfinite().all():
            raise CheckpointError(
                f"The weights of `{name}` must be finite, but `{key}` holds NaN or infinity. Fetch them again; if "
                "they stay so, the checkpoint is broken."
            )
