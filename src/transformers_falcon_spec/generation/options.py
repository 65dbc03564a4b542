"""Options of speculative decoding, kept with the drafter as stock assistants keep theirs."""

from typing import Any

from transformers import GenerationConfig

from ..core.tree import DraftTree
from ..errors import OptionError

VERIFIERS = ("lazy_walk", "recursive_rejection", "traversal", "gumbel")


class SpeculationConfig(GenerationConfig):
    """What `drafter.generation_config` holds; saved beside the drafter's weights.

    Args:
        draft_tree (`dict`, *optional*):
            `{"parents": [...], "ranks": [...]}`, the tree to draft. None takes the one in the drafter's config.
        verifier (`str`, *optional*, defaults to `"lazy_walk"`):
            What of a draft becomes text when sampling: `"lazy_walk"` gives the text of the target alone for the same seed;
            `"recursive_rejection"` and `"traversal"` draw the draft and keep the target's distribution; `"gumbel"` gives one
            text for a seed whatever the drafter. Greedy decoding always walks.

        strict (`bool`, *optional*, defaults to `False`):
            Choices that rounding could change are made again from a forward over one token, as decoding without a drafter
            reads it. Costs a forward for each, counted as `num_reread`; for text that must not differ in low precision.

    Raises:
        [`OptionError`]: an option that exists neither here nor in `GenerationConfig`.

    Example:

    ```python
    >>> SpeculationConfig(draft_tree=DraftTree.chain(2).to_json()).draft_tree
    {'parents': [-1, 0, 1], 'ranks': [-1, 0, 0]}

    ```
    """

    def __init__(
        self,
        draft_tree: dict[str, Any] | None = None,
        verifier: str = "lazy_walk",
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        unknown = [name for name in kwargs if not name.startswith("_") and not hasattr(_KNOWN, name)]
        if unknown:
            raise OptionError(
                f"`SpeculationConfig` has no option {', '.join(f'`{name}`' for name in unknown)}. "
                "Options of its own: `draft_tree`, `verifier` and `strict`; all others are those of `GenerationConfig`."
            )
        if draft_tree is not None:
            DraftTree.from_json(draft_tree)
        if verifier not in VERIFIERS:
            raise OptionError(f"`verifier` must be one of {VERIFIERS}, but it is {verifier!r}.")
        if strict and verifier != "lazy_walk":
            raise OptionError(
                f'`strict` re-reads choices of the target, so `verifier` must be "lazy_walk", but it is {verifier!r}.'
            )
        self.draft_tree, self.verifier, self.strict = draft_tree, verifier, strict
        super().__init__(**kwargs)


_KNOWN = GenerationConfig()
