"""From foreign names to a whole drafter: no weight missing, none left over, every shape as the config says."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..drafters.base import DrafterModel
from ..errors import CheckpointError
from .source import Checkpoint
from .weight_files import some


@dataclass(frozen=True)
class Conversion:
    """What a converter makes of a checkpoint.

    Args:
        drafter_class (`type`): The drafter it becomes.
        config (`PreTrainedConfig`): Its configuration.
        weights (`dict`): Its weights under the names of this package.
        dropped (`list[str]`): Foreign weights that are left out, because they are the target's own.
        filled (`dict`): Weights that the source does not have, and the value that stands for them.
    """

    drafter_class: type[DrafterModel]
    config: PreTrainedConfig
    weights: dict[str, Tensor]
    dropped: list[str] = field(default_factory=list)
    filled: dict[str, float] = field(default_factory=dict)


def renamed(
    checkpoint: Checkpoint, names: dict[str, str], droppable: Collection[str] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under new names, and which of `droppable` were there.

    Args:
        checkpoint (`Checkpoint`): Where they come from.
        names (`dict`): The new name of every weight that must be there.
        droppable (`Collection[str]`): Weights that may be there and are left out.

    Raises:
        [`CheckpointError`]: weights are missing or left over.
    """
    seen = set(checkpoint.tensors)
    missing, unexpected = set(names) - seen, seen - set(names) - set(droppable)
    if missing or unexpected:
        wrong = {"missing": sorted(missing), "unexpected": sorted(unexpected)}
        parts = [f"{kind}: {some(found)}" for kind, found in wrong.items() if found]
        raise CheckpointError(
            f"`{checkpoint.name}` must hold exactly the weights of its format, but there are {'; '.join(parts)}. "
            f"Check that config and weights belong together and that no weight was renamed."
        )
    return {ours: checkpoint.tensors[theirs] for theirs, ours in names.items()}, sorted(seen & set(droppable))


def check_shape(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> None:
    """Refuse a weight of another shape; a weight that is not there has none.

    Raises:
        [`CheckpointError`]: with both shapes.
    """
    found = tuple(checkpoint.tensors[key].shape) if key in checkpoint.tensors else shape
    if found != shape:
        raise _wrong_shapes(checkpoint.name, {key: f"{found} instead of {shape}"})


def whole_drafter(conversion: Conversion, checkpoint: Checkpoint) -> DrafterModel:
    """The drafter, with every weight in the type that holds all of them.

    Raises:
        [`CheckpointError`]: a weight has another shape than the config says.
    """
    with torch.device("meta"):  # no memory, no draws: all weights come from the checkpoint
        drafter = conversion.drafter_class(conversion.config)
    expected = drafter.state_dict()
    assert set(expected) == set(conversion.weights)  # else a converter and its drafter disagree
    foreign = {id(weight): name for name, weight in checkpoint.tensors.items()}
    wrong = {
        foreign[id(weight)]: f"{_form(weight)} instead of {_form(expected[key])}"
        for key, weight in conversion.weights.items()
        if _form(weight) != _form(expected[key])
    }
    if wrong:
        raise _wrong_shapes(checkpoint.name, wrong)
    dtype = common_dtype(conversion.weights)
    weights = {  # copies, for Medusa files hold one weight under several names
        key: value.to(dtype if value.is_floating_point() else value.dtype, copy=True).contiguous()
        for key, value in conversion.weights.items()
    }
    drafter.load_state_dict(weights, assign=True)
    drafter.config.dtype = dtype
    return drafter


def common_dtype(weights: dict[str, Tensor]) -> torch.dtype:
    """The smallest floating point type that holds all of them."""
    found = {value.dtype for value in weights.values() if value.is_floating_point()}
    return reduce(torch.promote_types, found)


def _form(weight: Tensor) -> str:
    """Its shape, and its type unless that is a floating point one."""
    return f"{tuple(weight.shape)}" + ("" if weight.is_floating_point() else f" of {weight.dtype}")


def _wrong_shapes(name: str, wrong: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"The weights of `{name}` must have the shapes that its config says, but these do not: {some(wrong)}. "
        f"Check that config and weights belong together."
    )
