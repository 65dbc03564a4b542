"""Medusa: heads besides the target's own, each drafting one token further ahead (arXiv 2401.10774)."""

from .configuration_medusa import MedusaConfig
from .modeling_medusa import MedusaDrafter

__all__ = ["MedusaConfig", "MedusaDrafter"]
