"""DiffuSpec: any masked diffusion language model as a drafter (arXiv 2510.02358)."""

from transformers import AutoConfig, AutoModel

from .configuration_diffuspec import DiffusionConfig
from .modeling_diffuspec import DiffusionDrafter
from .proxy import NgramProxy

AutoConfig.register(DiffusionConfig.model_type, DiffusionConfig, exist_ok=True)
AutoModel.register(DiffusionConfig, DiffusionDrafter, exist_ok=True)

__all__ = ["DiffusionConfig", "DiffusionDrafter", "NgramProxy"]
