"""Falcon: semi-autoregressive drafting with an LSTM and relaxed-causal blocks (arXiv 2412.12639)."""

from transformers import AutoConfig, AutoModel

from .configuration_falcon import FalconSpecConfig
from .modeling_falcon import FalconSpecDrafter

AutoConfig.register(FalconSpecConfig.model_type, FalconSpecConfig, exist_ok=True)
AutoModel.register(FalconSpecConfig, FalconSpecDrafter, exist_ok=True)

__all__ = ["FalconSpecConfig", "FalconSpecDrafter"]
