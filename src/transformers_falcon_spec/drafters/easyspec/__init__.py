"""EasySpec: a small language model that drafts with several attention layers at once (arXiv 2502.02493)."""

from transformers import AutoConfig, AutoModel

from .configuration_easyspec import LayerParallelConfig
from .modeling_easyspec import LayerParallelDrafter

AutoConfig.register(LayerParallelConfig.model_type, LayerParallelConfig, exist_ok=True)
AutoModel.register(LayerParallelConfig, LayerParallelDrafter, exist_ok=True)

__all__ = ["LayerParallelConfig", "LayerParallelDrafter"]
