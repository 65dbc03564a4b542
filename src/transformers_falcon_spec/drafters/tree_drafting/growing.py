"""The base of drafters of one token a pass."""

from typing import ClassVar

from ...core.tree import DraftTree
from ..base import DrafterModel
from .plan import tree_from_json


class GrowingDrafter(DrafterModel):
    """A drafter of one token a pass, whose trees grow unless the options say otherwise."""

    can_grow_trees = True
    grows_trees = True
    default_depth: ClassVar[int]
    can_repeat_text = True

    @property
    def draft_tree(self) -> DraftTree:
        """The static tree: that of `generation_config`, else of the config, else a chain of `tree_depth` tokens."""
        return tree_from_json(self.stored_tree or DraftTree.chain(self.tree_depth).to_json())

    @property
    def tree_depth(self) -> int:
        """How deep trees grow; a pass for each token."""
        return self.generation_config.tree_depth or self.default_depth

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root included."""
        num_grown = self.generation_config.num_tree_nodes * self.is_tree_dynamic
        return max(num_grown, len(self.draft_tree)) + self.num_text_tokens
