"""Medusa: heads beside the target's own, each drafting one token further ahead (arXiv 2401.10774)."""

from transformers import AutoConfig, AutoModel

from .configuration_medusa import MedusaConfig
from .modeling_medusa import MedusaDrafter

AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
AutoModel.register(MedusaConfig, MedusaDrafter, exist_ok=True)

__all__ = ["MedusaConfig", "MedusaDrafter"]
