"""The options of speculative decoding, which are stored in the drafter's `generation_config`."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from transformers import GenerationConfig

from ..core.options import check_options, option
from ..core.tree import DraftTree
from ..errors import OptionError, quoted
from .packed_linear import AUTO
from .verifier import TOKEN_MATCHING, verifier_named

STOCK_ASSISTANTS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)


@dataclass(init=False, repr=False, eq=False)
class SpeculationConfig(GenerationConfig):
    """What `drafter.generation_config` holds; saved beside the drafter's weights.

    Args:
        draft_tree (`dict`, *optional*):
            `{"parents": [...], "ranks": [...]}`, the static tree to draft. None takes the one in the drafter's config.
        dynamic_tree (`bool`, *optional*):
            Grow a tree from the drafter's probabilities in every step instead of drafting a static one. None leaves it
            to the kind of drafter, and a `draft_tree` given here says no. Rules that verify drawn tokens always get
            the static tree.
        num_tree_nodes (`int`, *optional*):
            Nodes that are kept of a grown tree, root included, where nothing is tuned. None keeps 16, and more where a
            captured step reads more at about the same cost: then up to 64 in each row, of all rows together about 128,
            a branch of repeated text included.
        tree_depth (`int`, *optional*): How deep it grows. None leaves it to the kind of drafter, and to the tuner.
        tree_top_k (`int`, *optional*, defaults to 4):
            Least nodes of a depth with children, and children of each. Larger trees have more, unless
            `num_tree_nodes` is given.
        sliding_window (`int`, *optional*):
            Newest tokens of the text that a Falcon, Eagle or MTP drafter attends to, which bounds its memory, too.
            None takes the one in the drafter's config.
        prompt_lookup_num_tokens (`int`, *optional*):
            Most tokens of one more branch of each tree of a Falcon, Eagle, MTP, EasySpec or DFlash drafter: what
            followed the newest tokens where they stood before, in the prompt or the text. Its nodes come on top of the
            others; tuned, as many of them as pay. Where the whole branch is likely, as in a loop, the drafter is not
            asked. Without it, or with 0, there is no such branch. 10 is a good number.
        max_matching_ngram_size (`int`, *optional*):
            Most of the newest tokens that are looked for there, 2 without it; where so many are not found, fewer are.
        tune (`bool`, *optional*, defaults to `True`):
            Draft only what pays: seconds and acceptance are learned while decoding, a grown tree gets the nodes and
            passes that bring more than they cost, and where drafting costs more than it brings it pauses.
        deterministic (`bool`, *optional*, defaults to `True`):
            Nothing is tuned where drafts can change the text of a seed, as with rules that verify drawn tokens.
        verifier (`str`, *optional*, defaults to `"token_matching"`):
            What of a draft becomes text when sampling: `"token_matching"` gives the text of the target alone for the
            same seed; `"recursive_rejection"` and `"traversal"` draw the draft and keep the target's distribution;
            `"gumbel"` gives one text for a seed whatever the drafter. Greedy decoding always matches tokens.
            `register_verifier` adds rules of your own.
        pack_weights (`bool` or `str`, *optional*, defaults to `"auto"`):
            On a CPU, read trees with weights packed once, which makes several tokens cost about as much as one and
            takes a second copy of the weights. `"auto"` does so where the copies fit in half of the free memory and
            the read was measured to be faster.
        capture (`bool` or `str`, *optional*, defaults to `"auto"`):
            Capture the work of a step once and replay it, so that the host no longer decides how long a step takes.
            `"auto"` does so on CUDA where the call allows it. With `True` a call that cannot be captured is a
            [`GenerationError`] that says why; a CPU, which captures nothing, then decodes in the same fixed shapes.
        compile (`bool`, *optional*, defaults to `False`):
            Pass the forwards of the target, and of Falcon, Eagle, Medusa and DFlash drafters, through `torch.compile`
            inside captured steps, once for each number of rows and nodes, however long the text. It takes a minute
            or more each, and may decide near ties of 16-bit targets otherwise. Calls with `disable_compile=True` leave
            it out.

    Raises:
        [`OptionError`]: an option that exists neither here nor in `GenerationConfig`, or a value out of range.

    Example:

    ```python
    >>> SpeculationConfig(draft_tree=DraftTree.chain(2).to_json()).draft_tree
    {'parents': [-1, 0, 1], 'ranks': [-1, 0, 0]}

    ```
    """

    draft_tree: dict[str, Any] | None = option(None, check=DraftTree.from_json)
    dynamic_tree: bool | None = None
    num_tree_nodes: int | None = option(None, least=2)
    tree_depth: int | None = option(None, least=1)
    tree_top_k: int = option(4, least=1)
    sliding_window: int | None = option(None, least=1)
    prompt_lookup_num_tokens: int | None = option(None, least=0)
    max_matching_ngram_size: int | None = option(None, least=1)
    tune: bool = True
    deterministic: bool = True
    verifier: str = option(TOKEN_MATCHING.name, check=verifier_named)
    pack_weights: bool | str = option(AUTO, one_of=(True, False, AUTO))
    capture: bool | str = option(AUTO, one_of=(True, False, AUTO))
    compile: bool = option(False, one_of=(True, False))

    def __init__(self, **options: Any) -> None:
        own = {}
        for field in fields(SpeculationConfig):
            own[field.name] = options.pop(field.name, field.default)

        super().__init__(**options)
        for name, value in own.items():
            setattr(self, name, value)

        self.check()

    def check(self) -> None:
        """Refuse options that cannot be meant, which may have been set one by one: [`OptionError`]."""
        own = self.own_options()
        known = {*own, *vars(_KNOWN)}
        unknown = [name for name in vars(self) if not name.startswith("_") and name not in known]
        if unknown:
            raise OptionError(
                f"`SpeculationConfig` has no option {quoted(unknown)}. Options of its own: {quoted(own)}; all others "
                "are those of `GenerationConfig`."
            )

        check_options(self)
        if self.compile and self.capture is False:
            raise OptionError(
                '`compile` needs captured steps, so `capture` must be "auto" or True, but it is False. Leave '
                "`compile` out, or let steps be captured."
            )

    def own_options(self) -> dict[str, Any]:
        """The options that it has besides those of `GenerationConfig`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_options(self) -> list[str]:
        """Those of its own options that are not as by default."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


_KNOWN = GenerationConfig()


def check_not_of_drafter(names: Iterable[str]) -> None:
    """Raise an error for options of a drafter that were given to a call, which does not read them."""
    own = {field.name for field in fields(SpeculationConfig) if not hasattr(_KNOWN, field.name)}
    found = sorted(own.intersection(names))
    if found:
        raise OptionError(
            f"Options of a drafter must be set on it, but {quoted(found)} came with the call. Set "
            f"`drafter.generation_config.{found[0]}`."
        )


def check_no_stock_options(config: GenerationConfig) -> None:
    """Raise an error for options by which Transformers' own assistants draft: drafters of this package have others."""
    defaults = config._get_default_generation_params()
    for name in STOCK_ASSISTANTS:
        value = getattr(config, name, None)
        if value not in {None, defaults.get(name)}:
            raise OptionError(
                f"`{name}` is {value!r}, but only Transformers' own assistants read it. How much a drafter of this "
                "package drafts is tuned while it decodes; set `num_tree_nodes` and `tree_depth` of "
                "`drafter.generation_config` to decide it yourself, and leave this out."
            )


def check_drafter_options(drafter: Any) -> None:
    """Raise an error for options of another class on a drafter, and for those that it cannot follow."""
    options = drafter.generation_config
    if not all(hasattr(options, field.name) for field in fields(SpeculationConfig)):  # a recipe has its own class
        raise OptionError(
            "`generation_config` of a drafter must be a `SpeculationConfig`, but that of this "
            f"`{type(drafter).__name__}` is a `{type(options).__name__}`. Set `drafter.generation_config = "
            "SpeculationConfig()`; what it holds for the text, such as a temperature, belongs to the target."
        )

    check_no_stock_options(options)
    options.check()
    if options.prompt_lookup_num_tokens and not getattr(drafter, "can_repeat_text", True):
        raise OptionError(
            f"A `{type(drafter).__name__}` drafts no branch of repeated text, so `prompt_lookup_num_tokens` must be "
            f"None or 0, but it is {options.prompt_lookup_num_tokens}. Leave it out."
        )
