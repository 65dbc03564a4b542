"""Speculative decoding for Transformers: drafters behind `target.generate(..., assistant_model=drafter)`.

Importing the package lets `generate` take its drafters; `disable()` takes that back.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import naming_extras

if TYPE_CHECKING:
    from .convert.conversion import load_drafter
    from .core.options import option
    from .core.stats import GenerationStats
    from .core.tree import DraftTree
    from .core.verification import AcceptedPath, match_tokens
    from .drafters.base import DrafterModel
    from .drafters.config_fields import DrafterConfig
    from .drafters.dflash import DFlashConfig, DFlashDrafter
    from .drafters.diffuspec import DiffusionConfig, DiffusionDrafter
    from .drafters.eagle import EagleConfig, EagleDrafter
    from .drafters.easyspec import LayerParallelConfig, LayerParallelDrafter
    from .drafters.falcon import FalconSpecConfig, FalconSpecDrafter
    from .drafters.lookahead import LookaheadConfig, LookaheadDrafter
    from .drafters.medusa import MedusaConfig, MedusaDrafter
    from .drafters.mtp import MtpConfig, MtpDrafter
    from .drafters.parallel_eagle import ParallelEagleConfig, ParallelEagleDrafter
    from .drafters.registry import register_drafter
    from .drafters.tree_drafting.repeated_text import TextStore, draft_from
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
    from .generation.capture.state import release
    from .generation.drafting import Draft, TreeCandidateGenerator
    from .generation.options import SpeculationConfig
    from .generation.output import collect_speculation
    from .generation.patch import attach, disable, enable
    from .generation.verifier import Verifier, register_verifier
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
    "ParallelEagleConfig",
    "ParallelEagleDrafter",
    "ParityError",
    "PatchError",
    "PublishError",
    "RequestError",
    "SpeculationConfig",
    "TargetError",
    "TextStore",
    "TrainingError",
    "TreeCandidateGenerator",
    "Verifier",
    "attach",
    "collect_speculation",
    "disable",
    "draft_from",
    "enable",
    "load_drafter",
    "match_tokens",
    "option",
    "register_drafter",
    "register_verifier",
    "release",
]

_HOMES = {
    "convert.conversion": ["load_drafter"],
    "core.options": ["option"],
    "core.stats": ["GenerationStats"],
    "core.tree": ["DraftTree"],
    "core.verification": ["AcceptedPath", "match_tokens"],
    "drafters.base": ["DrafterModel"],
    "drafters.config_fields": ["DrafterConfig"],
    "drafters.dflash": ["DFlashConfig", "DFlashDrafter"],
    "drafters.diffuspec": ["DiffusionConfig", "DiffusionDrafter"],
    "drafters.eagle": ["EagleConfig", "EagleDrafter"],
    "drafters.easyspec": ["LayerParallelConfig", "LayerParallelDrafter"],
    "drafters.falcon": ["FalconSpecConfig", "FalconSpecDrafter"],
    "drafters.lookahead": ["LookaheadConfig", "LookaheadDrafter"],
    "drafters.medusa": ["MedusaConfig", "MedusaDrafter"],
    "drafters.mtp": ["MtpConfig", "MtpDrafter"],
    "drafters.parallel_eagle": ["ParallelEagleConfig", "ParallelEagleDrafter"],
    "drafters.registry": ["register_drafter"],
    "drafters.tree_drafting.repeated_text": ["TextStore", "draft_from"],
    "errors": [
        "BenchmarkError",
        "CheckpointError",
        "ConversationError",
        "DistributedError",
        "DrafterMismatchError",
        "DraftTreeError",
        "EndpointError",
        "FalconSpecError",
        "GenerationError",
        "HubError",
        "OptionError",
        "ParityError",
        "PatchError",
        "PublishError",
        "RequestError",
        "TargetError",
        "TrainingError",
    ],
    "generation.drafting": ["Draft", "TreeCandidateGenerator"],
    "generation.options": ["SpeculationConfig"],
    "generation.output": ["collect_speculation"],
    "generation.patch": ["attach", "disable", "enable"],
    "generation.capture.state": ["release"],
    "generation.verifier": ["Verifier", "register_verifier"],
    "training.arguments": ["DrafterTrainingArguments"],
    "training.trainer": ["DrafterTrainer"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: what only training or conversion needs takes seconds."""
    if name not in _HOME_OF:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")

    with naming_extras():
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_program() -> bool:
    """Whether this process is `falcon-spec`, which answers `--help` at once and enables what a command needs later."""
    is_script = bool(sys.argv) and Path(sys.argv[0]).stem == "falcon-spec"
    return is_script or sys.orig_argv[1:3] in (["-m", __name__], ["-m", f"{__name__}.cli"])


if not _is_program():
    import_module(".generation.patch", __name__).enable()
    import_module(".drafters.registry", __name__)  # drafters are known to `AutoModel` from here on
