"""What each kind of drafter learns from a batch of pairs."""

from transformers import GenerationMixin, MuseGlimmerAssistantModel, PreTrainedModel

from ...drafters.diffuspec import DiffusionDrafter
from ...drafters.eagle import EagleDrafter
from ...drafters.falcon import FalconSpecDrafter
from ...drafters.medusa import MedusaDrafter
from ...errors import OptionError
from .autoregressive import AutoregressiveObjective
from .base import Objective, Outcome
from .dflash import DFlashObjective
from .diffusion import DiffusionObjective
from .eagle import EagleObjective
from .falcon import FalconObjective
from .medusa import MedusaObjective

OBJECTIVES: dict[type, type[Objective]] = {
    DiffusionDrafter: DiffusionObjective,
    EagleDrafter: EagleObjective,  # type: ignore[type-abstract]  # `of` leads to one that is whole
    FalconSpecDrafter: FalconObjective,
    MedusaDrafter: MedusaObjective,
    MuseGlimmerAssistantModel: DFlashObjective,
    GenerationMixin: AutoregressiveObjective,  # language models of Transformers; drafters of this package are none
}

__all__ = ["OBJECTIVES", "Objective", "Outcome", "objective_of"]


def objective_of(model: PreTrainedModel) -> type[Objective]:
    """The objective of a drafter of this kind.

    Raises:
        [`OptionError`]: nothing is known of how to train it.
    """
    for kind, objective in OBJECTIVES.items():
        if isinstance(model, kind):
            return objective.of(model)
    known = ", ".join(f"`{kind.__name__}`" for kind in OBJECTIVES)
    raise OptionError(f"`DrafterTrainer` trains {known}, but the model is a `{type(model).__name__}`.")
