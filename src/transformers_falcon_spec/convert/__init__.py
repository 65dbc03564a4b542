"""Converting checkpoints of other software to drafters of this package, and the reverse; see `docs/convert.md`."""

from .conversion import convert_checkpoint, load_drafter
from .export import export_drafter
from .formats import FORMATS, detect
from .table import Format

__all__ = ["FORMATS", "Format", "convert_checkpoint", "detect", "export_drafter", "load_drafter"]
