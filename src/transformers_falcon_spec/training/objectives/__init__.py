"""What each kind of drafter learns from a batch of pairs."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ...drafters.eagle import EagleDrafter
from ...drafters.falcon import FalconSpecDrafter
from ...errors import OptionError
from .base import Objective, Outcome
from .eagle import eagle_objective
from .falcon import FalconObjective

OBJECTIVES: dict[type[PreTrainedModel], Callable[..., Objective]] = {
    EagleDrafter: eagle_objective,
    FalconSpecDrafter: FalconObjective,
}

__all__ = ["OBJECTIVES", "Objective", "Outcome", "objective_for"]


def objective_for(model: PreTrainedModel, *args: Any) -> Objective:
    """The objective of a drafter of this kind; `args` are those of [`Objective`] after the model.

    Raises:
        [`OptionError`]: nothing is known of how to train it.
    """
    for kind, objective in OBJECTIVES.items():
        if isinstance(model, kind):
            return objective(model, *args)
    known = ", ".join(f"`{kind.__name__}`" for kind in OBJECTIVES)
    raise OptionError(f"`DrafterTrainer` trains {known}, but the model is a `{type(model).__name__}`.")
