"""Lookahead Decoding: drafts from n-grams of the text and of a Jacobi window; nothing is trained (arXiv 2402.02057)."""

from transformers import AutoConfig, AutoModel

from .configuration_lookahead import LookaheadConfig
from .modeling_lookahead import LookaheadDrafter

AutoConfig.register(LookaheadConfig.model_type, LookaheadConfig, exist_ok=True)
AutoModel.register(LookaheadConfig, LookaheadDrafter, exist_ok=True)

__all__ = ["LookaheadConfig", "LookaheadDrafter"]
