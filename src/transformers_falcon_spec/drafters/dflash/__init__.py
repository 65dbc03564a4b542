"""DFlash: block diffusion, which fills in a block of masks in one pass (arXiv 2602.06036).

`stock.py` makes the drafters of Transformers' own loop; the rest lets them draft chains and trees in this package's.
"""

from .configuration_dflash import DFlashConfig
from .modeling_dflash import DFlashDrafter
from .stock import ATTENTION, context_layers, make_dflash

__all__ = ["ATTENTION", "DFlashConfig", "DFlashDrafter", "context_layers", "make_dflash"]
