"""Eagle: one decoder layer drafts token by token from the target's features (arXiv 2401.15077, 2503.01840)."""

from .configuration_eagle import EagleConfig
from .modeling_eagle import EagleDrafter

__all__ = ["EagleConfig", "EagleDrafter"]
