"""Converting checkpoints of other software to drafters of this package, and the reverse; see `docs/convert.md`."""

from .conversion import convert_checkpoint
from .export import export_drafter
from .formats import Format, detect
from .loading import load_drafter

__all__ = ["Format", "convert_checkpoint", "detect", "export_drafter", "load_drafter"]
