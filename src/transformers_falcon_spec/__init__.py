"""Speculative decoding for Transformers: drafters behind `target.generate(..., assistant_model=drafter)`.

Importing the package lets `generate` take its drafters; `disable()` takes that back.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .convert.conversion import load_drafter
from .core.options import option
from .core.stats import GenerationStats
from .core.tree import DraftTree
from .core.verification import AcceptedPath, match_tokens
from .drafters.base import DrafterModel, TextDrafter
from .drafters.config_fields import DrafterConfig
from .drafters.dflash import DFlashConfig, DFlashDrafter
from .drafters.diffuspec import DiffusionConfig, DiffusionDrafter
from .drafters.eagle import EagleConfig, EagleDrafter
from .drafters.easyspec import LayerParallelConfig, LayerParallelDrafter
from .drafters.falcon import FalconSpecConfig, FalconSpecDrafter
from .drafters.lookahead import LookaheadConfig, LookaheadDrafter
from .drafters.medusa import MedusaConfig, MedusaDrafter
from .drafters.mtp import MtpConfig, MtpDrafter
from .drafters.registry import register_drafter
from .errors import (
    BenchmarkError,
    CheckpointError,
    ConversationError,
    DistributedError,
    DrafterMismatchError,
    DraftTreeError,
    EndpointError,
    FalconSpecError,
    GenerationError,
    HubError,
    OptionError,
    ParityError,
    PatchError,
    PublishError,
    RequestError,
    TargetError,
    TrainingError,
)
from .generation.drafting import Draft, TreeCandidateGenerator
from .generation.options import SpeculationConfig
from .generation.output import collect_speculation
from .generation.patch import attach, disable, enable
from .generation.static.state import release
from .generation.verifier import Verifier, register_verifier
from .hub import let_drafters_publish

if TYPE_CHECKING:
    from .training.arguments import DrafterTrainingArguments
    from .training.trainer import DrafterTrainer

__version__ = "0.1.0"
__all__ = [
    "AcceptedPath",
    "BenchmarkError",
    "CheckpointError",
    "ConversationError",
    "DFlashConfig",
    "DFlashDrafter",
    "DiffusionConfig",
    "DiffusionDrafter",
    "DistributedError",
    "Draft",
    "DraftTree",
    "DraftTreeError",
    "DrafterConfig",
    "DrafterMismatchError",
    "DrafterModel",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "EagleConfig",
    "EagleDrafter",
    "EndpointError",
    "FalconSpecConfig",
    "FalconSpecDrafter",
    "FalconSpecError",
    "GenerationError",
    "GenerationStats",
    "HubError",
    "LayerParallelConfig",
    "LayerParallelDrafter",
    "LookaheadConfig",
    "LookaheadDrafter",
    "MedusaConfig",
    "MedusaDrafter",
    "MtpConfig",
    "MtpDrafter",
    "OptionError",
    "ParityError",
    "PatchError",
    "PublishError",
    "RequestError",
    "SpeculationConfig",
    "TargetError",
    "TextDrafter",
    "TrainingError",
    "TreeCandidateGenerator",
    "Verifier",
    "attach",
    "collect_speculation",
    "disable",
    "enable",
    "load_drafter",
    "match_tokens",
    "option",
    "register_drafter",
    "register_verifier",
    "release",
]

_LATE = {"DrafterTrainer": "training.trainer", "DrafterTrainingArguments": "training.arguments"}


def __getattr__(name: str) -> Any:
    """Import what only training needs when it is asked for: that takes seconds."""
    if name not in _LATE:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f".{_LATE[name]}", __name__), name)


enable()
let_drafters_publish()
