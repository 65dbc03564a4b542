"""The provenance of results: the command, commit, versions and machine that every results file records."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.sha import sha_fileobj
from torch import Tensor, nn

_NUM_HASHED = 1024  # values of each weight that are hashed
_PACKAGES = ("torch", "transformers", "huggingface_hub", "accelerate", "numpy")
_ABSOLUTE = re.compile(r"(?<![\w./~-])(?:[A-Za-z]:[\\/]|/(?!/))[^\s'\"`,;:()\[\]{}<>|=]*")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_NO_OPTIONS = ("_name_or_path", "target_name_or_path", "transformers_version")
_exists = os.path.exists  # unlike `Path.exists` it takes texts that cannot be paths


def provenance(**settings: Any) -> dict[str, Any]:
    """A record of command, commit, versions and machine, with the `settings` that are needed to repeat a run.

    Paths are made portable by [`portable`]. The setting `device`, the CPU by default, is replaced by the name of the
    hardware.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        if find_spec(name) is not None:
            versions[name] = version(name)

    return {
        **portable(settings),
        "command": " ".join([Path(sys.argv[0]).name, *map(portable, sys.argv[1:])]),
        "commit": current_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "device": _machine(str(settings.get("device", "cpu"))),
        "threads": torch.get_num_threads(),
    }


def portable(value: Any) -> Any:
    """Replace absolute paths of this machine; everything else stays as it is.

    Paths in the current folder become relative, and of others `...` and the last two names are kept. `value` is a
    path, a text that may hold some, or lists and dictionaries of such.
    """
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(portable, value))

    if isinstance(value, str | Path):
        is_path = isinstance(value, Path) or _exists(Path(value).parent)  # it may hold spaces
        text = str(value)
        return _portable_path(text) if is_path else _ABSOLUTE.sub(lambda found: _portable_path(found[0]), text)

    return value


def _portable_path(text: str) -> str:
    path = Path(os.path.normpath(text))
    names = path.parts[1:]
    if not path.is_absolute() or not names or not _exists(Path(path.anchor, names[0])):
        return text  # no path of this machine
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd()).as_posix()

    return "/".join(["...", *names[-2:]])


def _machine(device: str) -> str:
    """The name of the hardware; a machine with a GPU may compute on its CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(None if device == "auto" else device)

    name = _cpu_field("model name") or platform.processor()
    kinds = [name, torch.backends.cpu.get_cpu_capability(), *processor_flags()]
    return f"CPU, {os.cpu_count()} cores ({', '.join(filter(None, kinds))})"


def processor_flags() -> list[str]:
    """Those instructions of the processor that decide how fast each type is; none where Linux does not list them.

    What PyTorch uses of them may be less: the record of a machine names that as well.
    """
    present = _cpu_field("flags").split()
    return [flag for flag in _FLAGS if flag in present]


def _cpu_field(name: str) -> str:
    """What Linux says of the processor under this name; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return "" if found is None else found[1]


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights (names, shapes, dtypes and first values) and of its active adapters."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for part in _stored_parts(_loaded(model, name, weight.detach())):
            digest.update(part.flatten()[:_NUM_HASHED].cpu().view(torch.uint8).numpy().tobytes())

    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # PEFT's layers; models have a method
            digest.update(f"{name} {_adapter_state(module)}".encode())

    return digest.hexdigest()


def configs_digest(model: Any, *names: str) -> str:
    """A hash of all options in a model's configs, or in those named; names of folders and versions are left out."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names or ("config", "generation_config"):
        config = getattr(model, name, None)
        options = {} if config is None else config.to_dict()
        kept = {key: value for key, value in options.items() if key not in _NO_OPTIONS}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())

    return digest.hexdigest()


def _loaded(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight itself, or the values that accelerate keeps elsewhere while it is offloaded."""
    owner, _, own = name.rpartition(".")
    kept = getattr(getattr(model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    return kept[own] if weight.is_meta and kept is not None else weight


def _stored_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a weight: itself, or those that a quantised weight is packed into."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return

    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from _stored_parts(getattr(weight, name))


def _adapter_state(layer: Any) -> list[Any]:
    """The merged and active adapters of a PEFT layer with their scalings; the weights of adapters are parameters."""
    if layer.disable_adapters:
        return []

    scaling = getattr(layer, "scaling", {})
    return [sorted(layer.merged_adapters), [(name, scaling.get(name)) for name in layer.active_adapters]]


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file of any size, in hexadecimal digits."""
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def current_commit() -> str:
    """The commit of the checkout, with `-modified` if sources differ from it; `unknown` outside a checkout."""
    try:
        is_modified = _git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return _git("rev-parse", "HEAD") + ("-modified" if is_modified else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command, folder = ["git", *arguments], Path(__file__).parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
