"""Several drafters for one target: the tuner asks, in each step, the one that brings most tokens a second."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import OptionError
from ..generation.adapters import check_drafter_adapter, unwrapped
from ..generation.distributed import SINGLE_PROCESS, JoiningDrafter, Processes
from ..generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView, TreeCandidateGenerator
from ..generation.options import LOOKUP, SpeculationConfig
from ..generation.verifier import verifier_named
from .base import DrafterModel, LoopOnly

TREES = ("draft_tree", "dynamic_tree", "num_tree_nodes", "tree_depth", "tree_top_k", *LOOKUP)
COMMON = ("verifier", "tune", "deterministic", "pack_weights", "step", "compile")


class DrafterPool(LoopOnly, nn.Module):
    """Drafters of any kinds as one assistant. Under the walk the text does not depend on who drafts.

    Each one keeps its own trees. The pool's `generation_config` begins with what the drafters have in common
    of `verifier`, `tune`, `deterministic`, `pack_weights`, `step` and `compile`. Where nothing may be tuned the first
    one drafts alone.

    Args:
        drafters (`Sequence[DrafterModel]`): At least one, each maybe inside a `PeftModel`; all of them for the same
            target.

    Raises:
        [`OptionError`]: there is none, one is a pool itself, or they differ in those options.
        [`GenerationError`]: an adapter of one changes no weights, or options are set on the `PeftModel` around it.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> from transformers_falcon_spec import FalconSpecDrafter, LookaheadDrafter
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> falcon = FalconSpecDrafter.from_pretrained("models/falcon-reference")
    >>> pool = DrafterPool([falcon, LookaheadDrafter.from_target(target)])
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> drafted = target.generate(ids, assistant_model=pool, max_new_tokens=8, do_sample=False)
    >>> drafted.equal(target.generate(ids, max_new_tokens=8, do_sample=False))
    True

    ```
    """

    def __init__(self, drafters: Sequence[DrafterModel]) -> None:
        super().__init__()
        for drafter in drafters:
            check_drafter_adapter(drafter)
        drafters = [unwrapped(drafter) for drafter in drafters]
        if not drafters or not all(isinstance(drafter, DrafterModel) for drafter in drafters):
            kinds = [type(drafter).__name__ for drafter in drafters] or "none"
            raise OptionError(
                f"A `DrafterPool` must hold at least one drafter, and drafters alone, but it was given {kinds}."
            )
        self.members: Any = nn.ModuleList(drafters)
        self.config = drafters[0].config
        self.generation_config = SpeculationConfig(**self._common_options())

    def _common_options(self) -> dict[str, Any]:
        found = {name: [getattr(drafter.generation_config, name) for drafter in self.members] for name in COMMON}
        for name, values in found.items():
            if len(set(values)) > 1:
                raise OptionError(
                    f"Drafters of a `DrafterPool` must agree in `{name}`, but theirs are {values}. Set it alike in "
                    "each one's `generation_config`."
                )
        return {name: values[0] for name, values in found.items()}

    def join(self) -> Processes:
        """This process alone; drafters that compute on several are refused."""
        if any(isinstance(drafter, JoiningDrafter) and drafter.join().num > 1 for drafter in self.members):
            raise OptionError(
                "A drafter that computes on several processes must draft alone, for a pool chooses by the clock, and "
                "each process has its own. Pass it to `generate` itself."
            )
        return SINGLE_PROCESS

    @property
    def device(self) -> torch.device:
        """The device of its first drafter."""
        return self.members[0].device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states that any of them reads, those of the first drafter first."""
        return tuple(layer for drafter in self.members for layer in drafter.feature_layers)

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target that one of them was not made for, as each drafter does.

        Raises:
            [`OptionError`]: trees are asked of the pool and not of its drafters, or the clock would choose the drafter
                for a rule that compares draws with probabilities.
        """
        options, defaults = self.generation_config, SpeculationConfig()
        asked = [name for name in TREES if getattr(options, name) != getattr(defaults, name)]
        if asked:
            raise OptionError(
                f"Trees must be asked of each drafter of a `DrafterPool`, but its own options have {asked}. Set "
                "`pool.members[0].generation_config` and so on."
            )
        if verifier_named(options.verifier).needs_draft_probs and not options.deterministic:
            raise OptionError(
                f'A `DrafterPool` asks a drafter by the clock, so with `verifier="{options.verifier}"`, which '
                "compares draws with probabilities, `deterministic` must be True, but it is False."
            )
        for drafter in self.members:
            drafter.check_target(model)

    def candidate_generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> "PoolGenerator":
        """A generator that drafts with any of them for one call."""
        return PoolGenerator(self, target, max_length, rng)


class PoolGenerator(TreeCandidateGenerator):
    """Generators of several drafters: all receive the new text, one drafts."""

    def __init__(self, pool: DrafterPool, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        widths = [drafter.feature_size for drafter in pool.members]
        shared = {"vocab_size": target.vocab_size, "embed": target.embed, "head": target.head}
        views = [SimpleNamespace(feature_dim=width, **shared) for width in widths]
        members = zip(pool.members, views, strict=True)
        self.generators = [drafter.candidate_generator(view, max_length, rng) for drafter, view in members]
        self.feature_layers = pool.feature_layers
        self.wants_node_choices = any(generator.wants_node_choices for generator in self.generators)
        self._columns = list(pairwise(accumulate(widths, initial=0)))  # of each one's features

    def commit(self, committed: Committed) -> None:
        """Hand everyone the text and the features that it reads."""
        for generator, own in zip(self.generators, self._parts(committed.features), strict=True):
            generator.commit(replace(committed, features=own))

    def _parts(self, features: Tensor | None) -> list[Tensor | None]:
        """The features that each of them reads; None for those that read none."""
        return [
            features[..., start:end] if features is not None and end > start else None for start, end in self._columns
        ]

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """The reason of the first one that cannot draft in fixed shapes."""
        return next(filter(None, (generator.why_not_fixed(budget) for generator in self.generators)), None)

    @property
    def why_rows_stay(self) -> str | None:
        """The reason of the first one from which a row that has ended cannot leave."""
        return next(filter(None, (generator.why_rows_stay for generator in self.generators)), None)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let all of them go on with these rows alone."""
        for generator in self.generators:
            generator.select_rows(rows)

    @property
    def has_unread(self) -> bool:
        """Whether each of them has new text."""
        return all(generator.has_unread for generator in self.generators)

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> tuple[Any, ...]:
        """Let all of them go on in fixed shapes."""
        own = [None] * len(self.generators) if buffers is None else buffers
        for generator in self.generators:
            generator.backend = self.backend
        self.fixed = tuple(
            generator.enter_fixed(num_slots, most_kept, each)
            for generator, each in zip(self.generators, own, strict=True)
        )
        return self.fixed

    def commit_kept(self, kept: Kept) -> None:
        """Hand everyone the text and the features that it reads."""
        for generator, own in zip(self.generators, self._parts(kept.features), strict=True):
            generator.commit_kept(replace(kept, features=own))

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The draft of the drafter that the budget names."""
        return self.generators[budget.drafter].propose(budget)
