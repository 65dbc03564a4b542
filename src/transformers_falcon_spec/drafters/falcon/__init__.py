"""Falcon: semi-autoregressive drafting with an LSTM and relaxed-causal blocks (arXiv 2412.12639)."""

from .configuration_falcon import FalconSpecConfig
from .modeling_falcon import FalconSpecDrafter

__all__ = ["FalconSpecConfig", "FalconSpecDrafter"]
