"""Stock RMSNorms in two kernels instead of eight, for captured work alone: nothing of the model itself changes."""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model_parts import changed_copy
from .graph import is_capturing

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TAKES = ["self", "hidden_states"]
_NUM_STATES = 64  # for which a norm is tried, from small ones, among which its epsilon counts, to large ones
_SAME = 16 * torch.finfo(torch.float32).eps  # relative, which the order of a sum in float32 explains
_ON_EDGES = 0.01  # share of numbers that may lie so near to the edge of a shorter type that they are rounded across it

_FITS: dict[tuple[Any, ...], bool] = {}  # whether the fused form is right, by all that decides what a norm computes


class FusedNorm(nn.Module):
    """What Llama's RMSNorm and its equals compute, on the weight and with the hooks of such a module."""

    def __init__(self, stock: nn.Module) -> None:
        vars(self).update(vars(stock))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """States `[..., width]`, normed in float32 and rounded to their type before they meet the weight."""
        weight, epsilon = cast("Tensor", self.weight), cast("float", self.variance_epsilon)
        return weight * functional.rms_norm(hidden_states, weight.shape, None, epsilon)


def as_captured(model: Any) -> Any:
    """The model, but where work is captured one like it with fused norms; its warm-up has them, too.

    A replay is held against the warm-up, so both have to round alike. Which norms fit is found out in the warm-up,
    where the host may still be asked.
    """
    if not is_capturing():
        return model

    for part in model.modules():
        kind = _kind(part)
        if kind is not None and kind not in _FITS:
            _FITS[kind] = fits(part)

    return with_fused_norms(model)


def with_fused_norms(part: Any) -> Any:
    """A module with fused norms in the place of those that are known to fit; all that holds none is shared with it."""
    kind = _kind(part)
    if kind is not None and _FITS.get(kind, False):
        return FusedNorm(part)

    children = {name: child and with_fused_norms(child) for name, child in part._modules.items()}
    is_same = all(children[name] is child for name, child in part._modules.items())
    return part if is_same else changed_copy(part, _modules=children)


def _kind(part: nn.Module) -> tuple[Any, ...] | None:
    """What decides how a norm of Transformers computes but for the values of its weight; None of anything else."""
    weight: Any = part._parameters.get("weight")
    is_norm = hasattr(part, "variance_epsilon") and len(part._parameters) == 1 and weight is not None
    if not is_norm or weight.dtype not in _TYPES or "forward" in vars(part):
        return None

    forward = type(part).forward
    is_stock = forward.__module__.startswith("transformers.models.") and [*signature(forward).parameters] == _TAKES
    settings = repr([item for item in vars(part).items() if item[0][0] != "_"])
    return (forward, settings, weight.shape, weight.dtype, weight.device) if is_stock else None


def fits(norm: Any) -> bool:
    """Whether the fused form gives the numbers of a norm, for states of each type and a weight that are drawn.

    All but a hundredth have to be the same up to the order of a sum in float32, and these may be rounded across an
    edge of their shorter type.
    """
    weight, generator = norm.weight, torch.Generator().manual_seed(0)
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float, device="cpu") + 0.5
    tried = changed_copy(norm, _parameters={"weight": drawn.to(weight.device, weight.dtype)})
    sizes = torch.logspace(-3, 2, _NUM_STATES, dtype=torch.float, device="cpu")[:, None]
    states = torch.randn(1, _NUM_STATES, *weight.shape, generator=generator, dtype=torch.float, device="cpu") * sizes

    for dtype in _TYPES:
        given = states.to(weight.device, dtype)
        wanted, found = tried.forward(given), FusedNorm(tried).forward(given)
        if found.dtype != wanted.dtype:
            return False

        is_same = found.isclose(wanted, rtol=_SAME, atol=0)
        is_near = found.isclose(wanted, rtol=_SAME + 2 * torch.finfo(dtype).eps, atol=1e-6)
        if not is_near.all() or is_same.double().mean() < 1 - _ON_EDGES:
            return False

    return True
