"""The options of speculative decoding, which are stored in the drafter's `generation_config`."""

from typing import Any

from transformers import GenerationConfig

from ..core.tree import DraftTree
from ..errors import OptionError
from .packed_linear import AUTO, check_pack_weights
from .verifier import TOKEN_MATCHING, verifier_named

LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
OWN = (
    "draft_tree",
    "dynamic_tree",
    "num_tree_nodes",
    "tree_depth",
    "tree_top_k",
    "sliding_window",
    *LOOKUP,
    "tune",
    "deterministic",
    "verifier",
    "pack_weights",
    "step",
    "compile",
)
STEPS = ("auto", "dynamic", "static")
STOCK_ASSISTANTS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
)


class SpeculationConfig(GenerationConfig):
    """What `drafter.generation_config` holds; saved beside the drafter's weights.

    Args:
        draft_tree (`dict`, *optional*):
            `{"parents": [...], "ranks": [...]}`, the static tree to draft. None takes the one in the drafter's config.
        dynamic_tree (`bool`, *optional*):
            Grow a tree from the drafter's probabilities in every step instead of drafting a static one. None leaves it
            to the kind of drafter, and a `draft_tree` given here says no. Rules that verify drawn tokens always get
            the static tree.
        num_tree_nodes (`int`, *optional*, defaults to 16):
            Nodes that are kept of a grown tree, root included, where nothing is tuned.
        tree_depth (`int`, *optional*): How deep it grows. None leaves it to the kind of drafter, and to the tuner.
        tree_top_k (`int`, *optional*, defaults to 4): Least nodes of a depth with children, and children of each.
        sliding_window (`int`, *optional*):
            Newest tokens of the text that a Falcon or Eagle drafter attends to, which bounds its memory, too. None
            takes the one in the drafter's config.
        prompt_lookup_num_tokens (`int`, *optional*):
            Most tokens of one more branch of each tree of a Falcon, Eagle, EasySpec or DFlash drafter: what followed
            the newest tokens where they stood before, in the prompt or the text. Its nodes come on top of the others;
            tuned, as many of them as pay. Where it is all but sure to come, as in a loop, the drafter is not asked.
            Without it, or with 0, there is no such branch. 10 is a good number.
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
        step (`str`, *optional*, defaults to `"auto"`):
            `"static"` decodes in tensors of fixed shape, which a GPU captures once and replays, so that the host no
            longer decides how long a step takes; a call that cannot be served so is a [`GenerationError`] that says
            why. `"dynamic"` decodes in tensors that grow. `"auto"` is static on CUDA where the call allows it.
        compile (`bool`, *optional*, defaults to `False`):
            Pass the forwards of the target, and of Falcon, Eagle, Medusa and DFlash drafters, through `torch.compile`
            inside the static step, once for each number of rows and nodes, however long the text. It takes about half
            a minute each, and may decide near ties of 16-bit targets otherwise. Calls with `disable_compile=True`
            leave it out.

    Raises:
        [`OptionError`]: an option that exists neither here nor in `GenerationConfig`, or no longer.

    Example:

    ```python
    >>> SpeculationConfig(draft_tree=DraftTree.chain(2).to_json()).draft_tree
    {'parents': [-1, 0, 1], 'ranks': [-1, 0, 0]}

    ```
    """

    def __init__(  # noqa: PLR0913, PLR0917  each is an option, given by name
        self,
        draft_tree: dict[str, Any] | None = None,
        dynamic_tree: bool | None = None,
        num_tree_nodes: int = 16,
        tree_depth: int | None = None,
        tree_top_k: int = 4,
        sliding_window: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        tune: bool = True,
        deterministic: bool = True,
        verifier: str = TOKEN_MATCHING.name,
        pack_weights: bool | str = AUTO,
        step: str = "auto",
        compile: bool = False,  # noqa: A002  the field's word
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("strict", False):  # False stands in files of older versions and asks for nothing
            raise OptionError(
                "`strict` must be left out or False, but it is True. It did not keep texts of 16-bit targets equal "
                "and was removed: take it out of `generation_config.json`, and load the target in float32 where no "
                "tie may be decided otherwise."
            )
        unknown = [name for name in kwargs if not name.startswith("_") and not hasattr(_KNOWN, name)]
        if unknown:
            raise OptionError(
                f"`SpeculationConfig` has no option {', '.join(f'`{name}`' for name in unknown)}. "
                f"Options of its own: {', '.join(f'`{name}`' for name in OWN)}; all others are those of "
                "`GenerationConfig`."
            )
        if draft_tree is not None:
            DraftTree.from_json(draft_tree)
        limits = {"num_tree_nodes": (num_tree_nodes, 2), "tree_depth": (tree_depth, 1), "tree_top_k": (tree_top_k, 1)}
        limits |= {"sliding_window": (sliding_window, 1), "max_matching_ngram_size": (max_matching_ngram_size, 1)}
        limits["prompt_lookup_num_tokens"] = (prompt_lookup_num_tokens, 0)
        for name, (value, least) in limits.items():
            if value is not None and value < least:
                raise OptionError(f"`{name}` must be at least {least}, but it is {value}.")
        check_pack_weights(pack_weights)
        check_step(step, compile)
        self.draft_tree, self.verifier = draft_tree, verifier_named(verifier).name
        self.dynamic_tree, self.num_tree_nodes = dynamic_tree, num_tree_nodes
        self.tree_depth, self.tree_top_k, self.sliding_window = tree_depth, tree_top_k, sliding_window
        self.tune, self.deterministic, self.pack_weights = tune, deterministic, pack_weights
        self.step, self.compile = step, compile
        lookup = zip(LOOKUP, (prompt_lookup_num_tokens, max_matching_ngram_size), strict=True)
        super().__init__(**dict(lookup), **kwargs)


_KNOWN = GenerationConfig()


def check_step(step: Any, is_compiled: Any) -> None:
    """Raise an error unless the options of the static step can be meant."""
    if step not in STEPS:
        raise OptionError(f"`step` must be one of {STEPS}, but it is {step!r}.")
    if not isinstance(is_compiled, bool):
        raise OptionError(f"`compile` must be True or False, but it is {is_compiled!r}.")
    if is_compiled and step == "dynamic":
        raise OptionError(
            '`compile` needs fixed shapes, so `step` must be "auto" or "static", but it is "dynamic". Leave `compile` '
            "out, or let the step be static."
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


def check_options(drafter: Any) -> None:
    """Raise an error for options of another class on a drafter, and for those that it cannot follow."""
    options = drafter.generation_config
    if not all(hasattr(options, name) for name in OWN):  # a class by the same name may come from a recipe
        raise OptionError(
            "`generation_config` of a drafter must be a `SpeculationConfig`, but that of this "
            f"`{type(drafter).__name__}` is a `{type(options).__name__}`. Set `drafter.generation_config = "
            "SpeculationConfig()`; what it holds for the text, such as a temperature, belongs to the target."
        )
    check_no_stock_options(options)
    check_pack_weights(options.pack_weights)
    check_step(options.step, options.compile)
    if options.prompt_lookup_num_tokens and not getattr(drafter, "can_repeat_text", True):
        raise OptionError(
            f"A `{type(drafter).__name__}` drafts no branch of repeated text, so `prompt_lookup_num_tokens` must be "
            f"None or 0, but it is {options.prompt_lookup_num_tokens}. Leave it out."
        )
