"""EasySpec: a small language model that drafts with several attention layers at once (arXiv 2502.02493)."""

from .configuration_easyspec import LayerParallelConfig
from .modeling_easyspec import LayerParallelDrafter

__all__ = ["LayerParallelConfig", "LayerParallelDrafter"]
