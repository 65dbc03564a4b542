"""Small models at the cost of large ones: zeros around the weights, the same function. `docs/results.md` says what is exact."""

from .models import inflate, inflate_drafter
from .shapes import SHAPES, Layout, Shape

__all__ = ["SHAPES", "Layout", "Shape", "inflate", "inflate_drafter"]
