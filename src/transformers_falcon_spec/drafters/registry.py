"""The table of drafting methods: one entry for each, and [`register_drafter`] for those of other packages.

Training, cards and commands look a method up here. What belongs to layers above this one is named by a
string, such as `".training.objectives.falcon:FalconObjective"`, and imported when it is used; a leading dot stands for
this package.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ..errors import OptionError
from .base import DrafterModel
from .checkpoint import check_is_drafter, readable
from .dflash import DFlashDrafter
from .diffuspec import DiffusionDrafter
from .eagle import EagleDrafter
from .easyspec import LayerParallelDrafter
from .falcon import FalconSpecDrafter
from .lookahead import LookaheadDrafter
from .medusa import MedusaDrafter
from .parallel_eagle import ParallelEagleDrafter

PACKAGE = __package__.partition(".")[0]


@dataclass(frozen=True)
class DraftingMethod:
    """One way to draft, and where its parts are; [`register_drafter`] explains the fields."""

    name: str
    drafter: type[DrafterModel]
    title: str
    objective: type | str | None = None

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        """The class of its drafters' configurations."""
        return self.drafter.config_class

    @property
    def model_type(self) -> str:
        """The `model_type` of their configurations, by which `AutoModel` finds the class."""
        return self.config_class.model_type


METHODS: dict[str, DraftingMethod] = {}  # all that are known, by name


def register_drafter(
    name: str,
    drafter: type[DrafterModel],
    title: str,
    objective: type | str | None = None,
) -> None:
    """Make a kind of drafter known to `AutoModel`, to training, to publishing and to the command line.

    Commands find it if the module of the call is named by `--import`.

    Args:
        name (`str`): What options, recipes and records call the method; one that is there is replaced if the class is
            the same.
        drafter (`type[DrafterModel]`): The class of its drafters, whose `config_class` has a `model_type` of its own.
        title (`str`): What cards call it.
        objective (`type` or `str`, *optional*):
            What its drafters learn: a subclass of `training.objectives.Objective`, or `"module:Class"`. None: they are
            not trained.

    Raises:
        [`OptionError`]: the name or the `model_type` is that of another class.

    Example:

    ```python
    >>> register_drafter("falcon", EagleDrafter, "Falcon")
    Traceback (most recent call last):
        ...
    transformers_falcon_spec.errors.OptionError: The name and the `model_type` of a drafting method must be free, ...

    ```
    """
    method = DraftingMethod(name, drafter, title, objective)

    for other in METHODS.values():
        is_taken = other.name == name or other.model_type == method.model_type
        if is_taken and other.drafter is not drafter:
            raise OptionError(
                f"The name and the `model_type` of a drafting method must be free, but `{name}` or "
                f"`{method.model_type}` is that of `{other.drafter.__name__}`. Choose another name, and another "
                f"`model_type` in `{method.config_class.__name__}`."
            )

    AutoConfig.register(method.model_type, method.config_class, exist_ok=True)
    AutoModel.register(method.config_class, drafter, exist_ok=True)
    METHODS[name] = method


def drafter_classes() -> dict[str, type[DrafterModel]]:
    """Classes of drafters by the `model_type` of their configurations."""
    return {method.model_type: method.drafter for method in METHODS.values()}


def class_of(name_or_path: Any, **hub: Any) -> type[DrafterModel]:
    """The class of the drafter in a folder or repository, of an adapter that of the drafter beneath.

    Raises:
        [`CheckpointError`]: there is no drafter, or its files cannot be read.
    """
    known = drafter_classes()
    with readable(name_or_path):
        return known[check_is_drafter(name_or_path, known, **hub)]


def method_of(model: Any) -> DraftingMethod | None:
    """The method that a model drafts by; None where it is no drafter of a known one."""
    for method in METHODS.values():
        if isinstance(model, method.drafter):
            return method

    return None


def resolved(part: Any) -> Any:
    """A part of a method: itself, or what its string names."""
    if not isinstance(part, str):
        return part

    return resolve_name(PACKAGE + part if part.startswith(".") else part)


register_drafter("falcon", FalconSpecDrafter, "Falcon", ".training.objectives.falcon:FalconObjective")
register_drafter("peagle", ParallelEagleDrafter, "P-EAGLE")  # before Eagle, of which it is one
register_drafter("eagle", EagleDrafter, "Eagle", ".training.objectives.eagle:EagleObjective")
register_drafter("medusa", MedusaDrafter, "Medusa", ".training.objectives.medusa:MedusaObjective")
register_drafter("diffusion", DiffusionDrafter, "DiffuSpec", ".training.objectives.blocks:DiffusionObjective")
register_drafter("dflash", DFlashDrafter, "DFlash")
register_drafter("easyspec", LayerParallelDrafter, "EasySpec")
register_drafter("lookahead", LookaheadDrafter, "Lookahead")
