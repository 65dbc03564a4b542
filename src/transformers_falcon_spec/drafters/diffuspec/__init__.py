"""DiffuSpec: any masked diffusion language model as a drafter (arXiv 2510.02358)."""

from .configuration_diffuspec import DiffusionConfig
from .modeling_diffuspec import DiffusionDrafter
from .proxy import NgramProxy

__all__ = ["DiffusionConfig", "DiffusionDrafter", "NgramProxy"]
