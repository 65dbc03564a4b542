"""The base of all drafters: a `PreTrainedModel` that keeps options with its weights and checks its target."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import Self

from ..core.tree import MAX_NODES, DraftTree
from ..errors import CheckpointError, DrafterMismatchError, GenerationError, OptionError, PatchError
from ..generation.drafting import TargetView, TreeCandidateGenerator
from ..generation.head import feature_width
from ..generation.model_parts import check_has_weights, device_of, embedding_width, is_spread, named
from ..generation.options import SpeculationConfig
from .checkpoint import (
    base_of_adapter,
    check_finite,
    check_is_drafter,
    hub_options,
    let_others_read,
    options_of_base,
    put_adapter,
    read_options,
    readable,
)
from .config_fields import context_of, update_config
from .draft_vocabulary import DraftVocabulary
from .fingerprint import FIELD, check_fingerprint, target_name
from .tree_drafting.block_passes import chain, tree_from_json
from .tree_drafting.repeated_text import STORES

_PUSHED = (  # options of `push_to_hub` that `save_pretrained` takes, too
    *("repo_id", "private", "revision", "token"),
    *("target", "results", "about"),
)
_PUSH = f"{__package__.partition('.')[0]}.hub.publish:push"
NUM_TREE_NODES = 16  # of grown trees: on two cores more cost more than they bring
_KINDS_OF_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")  # of weights, as stock loading lists them


class DrafterModel(PreTrainedModel):
    """Base of the drafters: loads and saves options with the weights, and refuses targets that do not fit."""

    base_model_prefix = "drafter"
    generation_config: SpeculationConfig
    can_grow_trees: ClassVar[bool] = False
    grows_trees: ClassVar[bool] = False  # unless the options say otherwise
    default_tree: DraftTree | None = None  # the static tree where neither options nor config have one
    goes_on: ClassVar[bool] = True  # from what it drafted, in further passes
    has_window: ClassVar[bool] = False  # whether `sliding_window` bounds what it attends to
    can_repeat_text: ClassVar[bool] = False  # whether `prompt_lookup_num_tokens` gives its trees a branch
    config_class: Any
    # called with drafter, target, longest text and the generator of its draws
    generator_class: ClassVar[Callable[..., TreeCandidateGenerator]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.generation_config = SpeculationConfig()

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        weight = next(self.parameters(), None)
        if weight is None:
            raise OptionError(
                f"Transformers moves and saves models that have weights, but a `{type(self).__name__}` has none. "
                "Give it one: `self.marker = torch.nn.Parameter(torch.zeros(1))`."
            )
        return weight.device

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Drafters write no text, `target.generate(..., assistant_model=drafter)` does: [`PatchError`]."""
        raise PatchError(
            f"A `{type(self).__name__}` must be asked for drafts by this package's decoding loop, but it was asked "
            "for text, as Transformers' own assisted decoding does after `disable()`. Call "
            "`transformers_falcon_spec.enable()`, or `attach(target)` for one target, and then "
            "`target.generate(..., assistant_model=drafter)`."
        )

    _supports_logits_to_keep = generate  # what Transformers' own assisted decoding asks first

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """An untrained drafter for `target`, on its device; `options` are fields of its configuration."""
        return cls(cls.config_class.from_target(target, **options)).eval().to(device=device_of(target))

    def _start_at_zero(self, *names: str) -> None:
        """Start linear layers of these names, whose output is added as it is, at zero: guesses are close to uniform.

        The head makes logits of the output. Those of a large random one are far from uniform, and what is wrong in
        them must be unlearnt before anything is learnt.
        """
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear) and name.rpartition(".")[2] in names:
                nn.init.zeros_(part.weight)

    def get_input_embeddings(self) -> None:  # type: ignore[override]  # there is nothing to give
        """Drafters have none: tokens come as the target's embeddings."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's `hidden_states` that the drafter reads; none where its config names none."""
        return tuple(getattr(self.config, "feature_layers", ()))

    @property
    def feature_size(self) -> int:
        """Width of what it reads of the target at each token."""
        return int(getattr(self.config, "feature_size", 0))

    @property
    def stored_tree(self) -> dict[str, Any] | None:
        """The static tree of the options, else of the config; None where there is none."""
        return self.generation_config.draft_tree or getattr(self.config, "draft_tree", None)

    @property
    def draft_tree(self) -> Any:
        """The static tree that is drafted where trees do not grow; None for kinds that draft none."""
        stored = self.stored_tree
        return self.default_tree if stored is None else tree_from_json(stored)

    @property
    def is_tree_dynamic(self) -> bool:
        """Whether trees grow, where the verifier lets them; a tree in the options says no."""
        options = self.generation_config
        if options.dynamic_tree and not self.can_grow_trees:
            raise OptionError(
                f"A `{type(self).__name__}` grows no trees, so `dynamic_tree` must be None or False, but it is True."
            )

        by_default = self.grows_trees and options.draft_tree is None
        return by_default if options.dynamic_tree is None else options.dynamic_tree

    @property
    def tree_depth(self) -> int:
        """How deep trees grow."""
        return self.generation_config.tree_depth or self.default_depth

    @property
    def default_depth(self) -> int:
        """How deep they grow unless the options say otherwise."""
        return self.block_size

    @property
    def sliding_window(self) -> int | None:
        """The newest tokens of the text that it attends to, by the options or its config; None is all of them."""
        given = self.generation_config.sliding_window
        if given is not None and not self.has_window:
            raise OptionError(
                f"A `{type(self).__name__}` has no window of its own, so `sliding_window` must be None, but it is "
                f"{given}. Falcon, Eagle and MTP drafters have one; a whole model that drafts has that of its own "
                "config."
            )

        return self.config.sliding_window if self.has_window and given is None else given

    @property
    def num_text_tokens(self) -> int:
        """Most tokens of the branch of repeated text; 0 where drafts have none."""
        return self.generation_config.prompt_lookup_num_tokens or 0

    @property
    def max_depth(self) -> int:
        """The depth of the deepest tree, a branch of repeated text left out."""
        tree = self.draft_tree
        return max(0 if tree is None else int(tree.depths.max()), self.tree_depth * self.is_tree_dynamic)

    @property
    def draft_settings(self) -> dict[str, Any] | None:
        """Settings besides weights that decide its drafts; they are kept with measurements."""
        options = self.generation_config
        settings: dict[str, Any] = {"draft_tree": self.stored_tree}

        if self.is_tree_dynamic:
            settings["num_tree_nodes"] = self.num_tree_nodes  # as of a CPU, so that a drafter's are the same anywhere
            settings["tree_top_k"] = options.tree_top_k
            settings["tree_depth"] = self.tree_depth

        if options.sliding_window is not None:  # that of the config goes with the weights
            settings["sliding_window"] = options.sliding_window

        if self.num_text_tokens:
            settings["prompt_lookup_num_tokens"] = self.num_text_tokens
            settings["max_matching_ngram_size"] = options.max_matching_ngram_size

        return settings

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass: one, unless the config says otherwise."""
        return int(getattr(self.config, "block_size", 1))

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root, lookahead nodes and a branch of repeated text included.

        Where options name no `num_tree_nodes`, a captured step may draft more.
        """
        return self._num_own_nodes + self.num_text_tokens

    @property
    def num_tree_nodes(self) -> int:
        """Nodes of grown trees, root included, where nothing is tuned and no captured step takes more."""
        return self.generation_config.num_tree_nodes or NUM_TREE_NODES

    @property
    def _num_own_nodes(self) -> int:
        """Most nodes of a draft, without a branch of repeated text."""
        num_static = 0 if self.draft_tree is None else len(self.draft_tree)
        return max(num_static, self.num_tree_nodes * self.is_tree_dynamic)

    def candidate_generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> TreeCandidateGenerator:
        """A generator that drafts with this model for one call.

        Raises:
            [`OptionError`]: the call is to draft from stores of texts, but drafts have no branch of repeated text.
        """
        if STORES.get() and not self.num_text_tokens:
            raise OptionError(
                "Texts of a store are drafted as a branch of repeated text, so `prompt_lookup_num_tokens` of "
                f"`drafter.generation_config` must be at least 1 under `draft_from`, but this `{type(self).__name__}` "
                f"has {self.generation_config.prompt_lookup_num_tokens}. 10 is a good number."
            )
        return self.generator_class(self, target, max_length, rng)

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for; what else differs from the right one is logged once.

        Raises:
            [`DrafterMismatchError`]: `model` has other sizes, or its ids are other tokens.
            [`CheckpointError`]: the fingerprint in the config cannot be read.
            [`GenerationError`]: the drafter is on another device.
            [`OptionError`]: the options ask for trees that the drafter or the decoding loop cannot have.
        """
        self._check_tree(model)
        for what, (expected, given) in self.compared_sizes(model).items():
            if expected != given:
                raise DrafterMismatchError(
                    f"This drafter expects {what} of size {expected}, but the target {named(model)} gives "
                    f"{given}. Load the target it was trained for: {target_name(self.config)}."
                )

        check_has_weights(model)
        is_meta, device = self.device.type == "meta", device_of(model)
        if is_meta or (self.device != device and not is_spread(model)):  # parts of a spread target move inputs
            raise GenerationError(
                f"The drafter must be on the target's device, `{device}`, but it is on `{self.device}`. "
                f"{'Load its weights' if is_meta else f'Move it: `drafter.to({str(device)!r})`'}."
            )

        check_fingerprint(self, model)

    def _check_tree(self, model: PreTrainedModel) -> None:
        """Refuse trees of which only a part could ever be drafted."""
        options = self.generation_config
        if options.draft_tree is not None and self.default_tree is None:
            raise OptionError(
                f"A `{type(self).__name__}` makes its trees itself, but `draft_tree` names a static one. Set "
                "`drafter.generation_config.draft_tree = None`."
            )

        _ = self.sliding_window  # which may be refused, too
        num_nodes = self._num_own_nodes
        context = context_of(model.config)
        if num_nodes > MAX_NODES or (context is not None and self.max_depth >= context):
            raise OptionError(
                f"A draft must have at most {MAX_NODES} nodes and end within the target's context of {context} "
                f"tokens, but the drafter's have up to {num_nodes} nodes and reach depth {self.max_depth}. Take a "
                "smaller `draft_tree`, or a smaller `num_tree_nodes` or `tree_depth`."
            )

        if not self.goes_on and self.max_depth > self.block_size:
            raise OptionError(
                f"A block has {self.block_size} slots, one for each depth, so trees must end at depth "
                f"{self.block_size}, but `draft_tree` or `tree_depth` reaches depth {self.max_depth}."
            )

    def compared_sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """By name each size that the drafter was made for, and that of a target."""
        sizes = {"a vocabulary": (self.config.vocab_size, model.config.get_text_config(decoder=True).vocab_size)}
        if self.feature_layers:
            sizes["features"] = (self.feature_size, feature_width(model, self.feature_layers))
        if hasattr(self.config, "embedding_size"):
            sizes["embeddings"] = (self.config.embedding_size, embedding_width(model))

        return sizes

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Save weights, config and options.

        The arguments are those of `PreTrainedModel.save_pretrained`; with `push_to_hub` also those of `push_to_hub`.
        """
        _ = self.device  # which may be refused
        pushed = {name: kwargs.pop(name) for name in _PUSHED if name in kwargs}
        is_pushed = kwargs.pop("push_to_hub", False)

        super().save_pretrained(save_directory, **kwargs)
        self.generation_config.save_pretrained(save_directory)

        if kwargs.get("is_main_process", True):
            let_others_read(save_directory)
            update_config(Path(save_directory))
            if is_pushed:
                self.push_to_hub(pushed.pop("repo_id", Path(save_directory).absolute().name), **pushed)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override]
        """Publish it: weights, config, card and provenance. The options are those of `hub.publish.push`.

        Raises:
            [`PublishError`]: the upload broke off or was refused.
        """
        push = resolve_name(_PUSH)  # of a layer above, which needs more than `generate` does
        return str(push(self, repo_id, **options))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a drafter, or an adapter with its drafter; arguments as for `PreTrainedModel.from_pretrained`.

        Raises:
            [`CheckpointError`]: a checkpoint of other software; files that cannot be read; weights that are missing,
                left over, of another shape or not finite.
        """
        with readable(pretrained_model_name_or_path):
            return cls._checked(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _checked(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        base = base_of_adapter(pretrained_model_name_or_path, **hub_options(kwargs))
        if base is not None:
            return cls._adapted(base, pretrained_model_name_or_path, *args, **kwargs)

        if pretrained_model_name_or_path is not None and "config" not in kwargs:
            check_is_drafter(pretrained_model_name_or_path, (cls.config_class.model_type,), **hub_options(kwargs))

        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, in words
        model, info = cls._load_model(pretrained_model_name_or_path, *args, **kwargs)
        wrong = {kind: sorted(map(str, info[kind])) for kind in _KINDS_OF_KEYS if info[kind]}
        if wrong:
            raise CheckpointError(
                f"`{pretrained_model_name_or_path}` must hold exactly the weights of `{cls.__name__}`, but it has "
                f"{wrong}. Take another checkpoint, or convert it if it comes from other software."
            )

        check_finite(model, pretrained_model_name_or_path)
        if isinstance(model, DraftVocabulary):
            model.check_draft_vocabulary(pretrained_model_name_or_path)

        options = read_options(pretrained_model_name_or_path, **hub_options(kwargs))
        model.generation_config = options or SpeculationConfig()
        return model

    @classmethod
    def _adapted(cls, base: str, adapter: Any, *args: Any, **kwargs: Any) -> Self:
        """The drafter `base` with an adapter, and with the options saved with that, if there are some."""
        hub = hub_options(kwargs)
        model = cls._checked(base, *args, **options_of_base(kwargs))
        put_adapter(model, adapter, **hub)
        check_finite(model, adapter)
        if hasattr(model.config, FIELD):  # of the drafter beneath, which the adapter fits to another target
            setattr(model.config, FIELD, None)

        model.generation_config = read_options(adapter, **hub) or model.generation_config
        return model

    @classmethod
    def _load_model(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """The model and what stock loading says of its weights."""
        return super().from_pretrained(name_or_path, *args, **kwargs)


class GrowingDrafter(DrafterModel):
    """A drafter whose trees grow unless the options say otherwise; static ones are chains by default."""

    can_grow_trees = True
    grows_trees = True
    can_repeat_text = True

    @property
    def default_tree(self) -> DraftTree:  # type: ignore[override]  # follows from the options
        """A chain of `tree_depth` tokens."""
        return chain(self.tree_depth)
