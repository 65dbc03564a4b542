"""Training objectives: the loss of each kind of drafter on a batch of pairs."""

from collections.abc import Callable
from typing import NamedTuple

from transformers import GenerationMixin, MuseGlimmerAssistantModel, PreTrainedModel

from ...drafters.autoregressive import make_draft_model
from ...drafters.dflash import make_dflash
from ...drafters.registry import METHODS, method_of, resolved
from ...errors import OptionError, quoted
from .base import AutoregressiveObjective, Objective, Outcome
from .blocks import DFlashObjective


class StockMethod(NamedTuple):
    """A drafting method of stock `generate`: its model class, the function that makes a model, its objective."""

    model_class: type
    make: Callable[..., PreTrainedModel]
    objective: type[Objective]


STOCK_METHODS = {
    "dflash": StockMethod(MuseGlimmerAssistantModel, make_dflash, DFlashObjective),
    # drafters of this package do not inherit from `GenerationMixin`
    "ar": StockMethod(GenerationMixin, make_draft_model, AutoregressiveObjective),
}

__all__ = ["STOCK_METHODS", "Objective", "Outcome", "objective_of"]


def objective_of(model: PreTrainedModel) -> type[Objective]:
    """The objective that trains a drafter of this class.

    Raises:
        [`OptionError`]: there is no objective for its class.
    """
    method = method_of(model)
    if method is not None and method.objective is not None:
        objective: type[Objective] = resolved(method.objective)
        return objective

    for stock in STOCK_METHODS.values():
        if isinstance(model, stock.model_class):
            return stock.objective

    known = [each.drafter for each in METHODS.values() if each.objective is not None]
    known += [stock.model_class for stock in STOCK_METHODS.values()]
    names = quoted(each.__name__ for each in known)
    raise OptionError(f"`DrafterTrainer` trains {names}, but the model is a `{type(model).__name__}`.")
