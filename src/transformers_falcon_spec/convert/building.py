"""Building a drafter from the weights of a foreign checkpoint; every weight must be used and have the right shape."""

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
from .weight_files import shortened


@dataclass(frozen=True)
class Conversion:
    """The result of a converter: class, config and weights of the drafter.

    Args:
        drafter_class (`type`): The class of the drafter.
        config (`PreTrainedConfig`): Its configuration.
        weights (`dict`): Its weights under the names of this package.
        dropped (`list[str]`): Foreign weights that are left out, because they are copies of the target's.
        filled (`dict`): Weights that the source does not have, and the value that each is filled with.
    """

    drafter_class: type[DrafterModel]
    config: PreTrainedConfig
    weights: dict[str, Tensor]
    dropped: list[str] = field(default_factory=list)
    filled: dict[str, float] = field(default_factory=dict)


def rename_weights(
    checkpoint: Checkpoint, names: dict[str, str], droppable: Collection[str] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename all weights as `names` says and list the `droppable` ones; no other may be missing or left over."""
    seen = set(checkpoint.tensors)
    missing, unexpected = set(names) - seen, seen - set(names) - set(droppable)
    if missing or unexpected:
        wrong = {"missing": sorted(missing), "unexpected": sorted(unexpected)}
        parts = [f"{kind}: {shortened(found)}" for kind, found in wrong.items() if found]
        raise CheckpointError(
            f"`{checkpoint.name}` must hold exactly the weights of its format, but there are {'; '.join(parts)}. "
            f"Check that config and weights belong together and that no weight was renamed."
        )
    return {ours: checkpoint.tensors[theirs] for theirs, ours in names.items()}, sorted(seen & set(droppable))


def check_shape(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> None:
    """Check the shape of a weight, if the checkpoint holds it."""
    found = tuple(checkpoint.tensors[key].shape) if key in checkpoint.tensors else shape
    if found != shape:
        raise _wrong_shapes(checkpoint.name, {key: f"{found} instead of {shape}"})


def build_drafter(conversion: Conversion, checkpoint: Checkpoint) -> DrafterModel:
    """Build the drafter, with every weight in the smallest dtype that holds all of them."""
    with torch.device("meta"):  # no memory, no draws: all weights come from the checkpoint
        drafter = conversion.drafter_class(conversion.config)
    expected = drafter.state_dict()
    assert set(expected) == set(conversion.weights)  # else a converter does not fit its drafter
    foreign = {id(weight): name for name, weight in checkpoint.tensors.items()}
    wrong = {
        foreign[id(weight)]: f"{_describe(weight)} instead of {_describe(expected[key])}"
        for key, weight in conversion.weights.items()
        if _describe(weight) != _describe(expected[key])
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
    """Return the smallest floating point dtype that holds all of the weights."""
    found = {value.dtype for value in weights.values() if value.is_floating_point()}
    return reduce(torch.promote_types, found)


def _describe(weight: Tensor) -> str:
    """Describe the shape of a weight, and its dtype unless that is a floating point one."""
    return f"{tuple(weight.shape)}" + ("" if weight.is_floating_point() else f" of {weight.dtype}")


def _wrong_shapes(name: str, wrong: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"The weights of `{name}` must have the shapes that its config says, but these do not: {shortened(wrong)}. "
        f"Check that config and weights belong together."
    )
