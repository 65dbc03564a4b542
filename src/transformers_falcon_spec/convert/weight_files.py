"""Reading tensors from safetensors files, and from pickles without running any code in them."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.bool)  # maps between vocabularies
NUM_NAMED = 8  # names shown in a message


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a `.safetensors`, `.bin` or `.pt` file to the CPU."""
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    wrong = {str(name): type(value).__name__ for name, value in content.items() if not isinstance(value, Tensor)}
    if wrong:
        raise CheckpointError(
            f"`{path}` must hold tensors by name, but it also holds {shortened(wrong)}. Save the state dict alone: "
            f"`torch.save(model.state_dict(), ...)`."
        )
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Read a pickle of tensors with `weights_only`, which refuses a file that needs any code to be run."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
        raise CheckpointError(
            f"`{path}` must be a pickle of plain tensors, but reading it would run code, or it is damaged: "
            f"{' '.join(reason.split())[:200]} Nothing in it was run. Ask for the weights as safetensors."
        ) from error
    except (EOFError, OSError, RuntimeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold tensors by name, but it holds a {type(content).__name__}.")
    return content


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return CheckpointError(
        f"`{path}` must be a whole file of weights, but it cannot be read ({reason}): cut short or damaged. "
        f"Fetch it again."
    )


def check_values(tensors: dict[str, Tensor], name: str) -> None:
    """Check that all weights are finite numbers of a plain dtype, so not quantised."""
    foreign = {key: str(value.dtype) for key, value in tensors.items() if value.dtype not in (*FLOATS, *INTEGERS)}
    if foreign:
        raise CheckpointError(
            f"The weights of `{name}` must be plain floating point numbers, but some are {shortened(foreign)}. "
            f"Take the checkpoint that was not quantised."
        )
    bad = [key for key, value in tensors.items() if value.dtype in FLOATS and not value.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"The weights of `{name}` must be finite, but {shortened(bad)} hold NaN or infinity. "
            f"Fetch them again; if they stay so, the checkpoint is broken."
        )


def shortened(names: Any) -> str:
    """Shorten a list of names, or a dictionary, to its first few entries for an error message."""
    shown = dict(list(names.items())[:NUM_NAMED]) if isinstance(names, dict) else sorted(names)[:NUM_NAMED]
    more = len(names) - NUM_NAMED
    return f"{shown}" + (f" and {more} more" if more > 0 else "")
