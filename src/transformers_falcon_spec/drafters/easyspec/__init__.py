"""EasySpec: a small language model that drafts with several attention layers at once (arXiv 2502.02493)."""

from .drafter import LayerParallelConfig, LayerParallelDrafter

__all__ = ["LayerParallelConfig", "LayerParallelDrafter"]
