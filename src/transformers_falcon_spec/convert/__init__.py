"""Converting checkpoints of other software to drafters of this package; `docs/convert.md` lists the formats."""

from .conversion import convert_checkpoint
from .formats import Format, detect
from .loading import load_drafter

__all__ = ["Format", "convert_checkpoint", "detect", "load_drafter"]
