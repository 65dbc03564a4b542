"""Lookahead Decoding: drafts from n-grams of the text and of a Jacobi window, without training (arXiv 2402.02057)."""

from .configuration_lookahead import LookaheadConfig
from .modeling_lookahead import LookaheadDrafter

__all__ = ["LookaheadConfig", "LookaheadDrafter"]
