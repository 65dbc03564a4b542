"""MTP: the layer for multi-token prediction that a target's checkpoint carries drafts chains and trees."""

from .configuration_mtp import MtpConfig
from .modeling_mtp import MtpDrafter

__all__ = ["MtpConfig", "MtpDrafter"]
