"""DiffuSpec: any masked diffusion language model as a drafter (arXiv 2510.02358)."""

from .drafter import DiffusionConfig, DiffusionDrafter
from .search import NgramProxy

__all__ = ["DiffusionConfig", "DiffusionDrafter", "NgramProxy"]
