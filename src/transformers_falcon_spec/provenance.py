"""Where a number comes from: the command, commit, versions and machine that every results file carries."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_NUM_HASHED = 1024  # values of each weight
_BYTES_AT_ONCE = 1 << 20
_PACKAGES = ("torch", "transformers", "huggingface_hub", "accelerate", "numpy")
_ABSOLUTE = re.compile(r"(?<![\w./~-])(?:[A-Za-z]:[\\/]|/(?!/))[^\s'\"`,;:()\[\]{}<>|=]*")
_HUB_FOLDER = re.compile(r"(?:models|datasets)--")  # of the Hub's cache: the name is in it


def provenance(**settings: Any) -> dict[str, Any]:
    """Command, commit, versions, machine, and the `settings` needed to run it again; paths are [`portable`].

    `device` among them is where it was computed, the CPU if left out; the record names that machine instead.
    """
    return {
        **portable(settings),
        "command": " ".join([Path(sys.argv[0]).name, *map(portable, sys.argv[1:])]),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "device": _machine(str(settings.get("device", "cpu"))),
        "threads": torch.get_num_threads(),
    }


def portable(value: Any) -> Any:
    """The same value, with every absolute path of this machine in a form that can be read on another one.

    What lies in the project, or in the current folder, is named from there, and so is what lies beside either, with
    `..`. Of other places the last two names are left, or the Hub's name and what follows, behind `...`.

    Args:
        value (`Any`): A path, a text that may hold some, or lists and dictionaries of such.
    """
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(portable, value))
    is_text, is_path = isinstance(value, str | Path), isinstance(value, Path)
    if is_text and Path(value).is_absolute() and (is_path or _is_here(Path(value).parent)):  # it may hold spaces
        return _portable_path(str(value))
    return _ABSOLUTE.sub(lambda found: _portable_path(found[0]), str(value)) if is_text else value


def _portable_path(text: str) -> str:
    path = Path(os.path.normpath(text))
    own, *names = path.parts
    if not names or not _is_here(Path(own, names[0])):  # nothing of this machine
        return text
    bases = [base for base in (project_folder(), Path.cwd()) if base is not None]
    for base in bases:
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    for base in bases:
        if len(base.parent.parts) > 1 and path.is_relative_to(base.parent):
            return f"../{path.relative_to(base.parent).as_posix()}"
    names = list(path.relative_to(Path.home()).parts) if path.is_relative_to(Path.home()) else names[1:] or names
    start = next((index for index, name in enumerate(names) if _HUB_FOLDER.match(name)), max(len(names) - 2, 0))
    return "/".join(["...", *names[start:]])


def _is_here(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file could be like that
        return False


def project_folder() -> Path | None:
    """The checkout that this package is used from; None where it is installed."""
    folder = Path(__file__).parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def _machine(device: str) -> str:
    """What computes there. A machine may have a GPU and compute on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return torch.cuda.get_device_name(None if device == "auto" else device)


def weights_fingerprint(model: nn.Module) -> str:
    """Tells models apart by names, shapes, types and first values of their weights, and by which adapters act."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for part in _stored_parts(_at_hand(model, name, weight.detach())):
            digest.update(part.flatten()[:_NUM_HASHED].cpu().view(torch.uint8).numpy().tobytes())
    for name, module in model.named_modules():
        if isinstance(
            getattr(module, "disable_adapters", None), bool
        ):  # PEFT's layers, and not models, which have a method
            digest.update(f"{name} {_adapter_state(module)}".encode())
    return digest.hexdigest()


def _at_hand(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight, or what accelerate keeps of it elsewhere while it has no values."""
    owner, _, own = name.rpartition(".")
    kept = getattr(getattr(model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    return kept[own] if weight.is_meta and kept is not None else weight


def _stored_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a weight is made of: itself, or what a quantised one is packed into."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from _stored_parts(getattr(weight, name))


def _adapter_state(layer: Any) -> list[Any]:
    """What of its adapters a layer of PEFT uses, and how much; their weights are parameters."""
    if layer.disable_adapters:
        return []
    scaling = getattr(layer, "scaling", {})
    return [sorted(layer.merged_adapters), [(name, scaling.get(name)) for name in layer.active_adapters]]


def file_sha256(path: Path) -> str:
    """The checksum of a file of any size, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()


def _commit() -> str:
    """The commit of the working tree, marked where files differ from it; `unknown` outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "src"],
            cwd=folder.parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-modified" if changed.stdout.strip() else "")
