"""The base of drafters whose trees can grow."""

from ...core.tree import DraftTree
from ..base import DrafterModel
from .plan import chain


class GrowingDrafter(DrafterModel):
    """A drafter whose trees grow unless the options say otherwise; static ones are chains by default."""

    can_grow_trees = True
    grows_trees = True
    can_repeat_text = True

    @property
    def default_tree(self) -> DraftTree:  # type: ignore[override]  # follows from the options
        """A chain of `tree_depth` tokens."""
        return chain(self.tree_depth)
