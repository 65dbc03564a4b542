"""Recipes of `falcon-spec train`: named sets of training options and fields of the drafter's config.

Options of the command line take precedence over the recipe. Methods without a recipe use the defaults of
[`DrafterTrainingArguments`] and of their config.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import SchedulerType

from ..drafters.falcon import paper_tree
from ..errors import OptionError
from .arguments import DrafterTrainingArguments

MEASURED_WIDTH = 256  # width of the drafters with which the default recipe was found


@dataclass(frozen=True)
class Recipe:
    """A set of training options and fields of the drafter's config that go together.

    If `measured_width` is given, the learning rate is that of a drafter of this width; it falls with the root of the
    width.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    drafter_config: Mapping[str, Any] = field(default_factory=dict)
    measured_width: int | None = None

    def apply(self, args: DrafterTrainingArguments, given: Collection[str], width: int | None) -> None:
        """Write the options for a drafter of this width into `args`, except those that the user has `given`."""
        settings = dict(self.training)
        if self.measured_width is not None and width is not None:
            settings["learning_rate"] *= (self.measured_width / width) ** 0.5
        for name, value in settings.items():
            if name not in given:
                setattr(args, name, value)
        args.check_tree()


# Loss weights, learning rate and architecture were found by the experiments in `LOG.md`, on a target of width 256, in
# runs of up to 8,000 steps, 200 of them warm-up. That the rate falls with the
# root of the width is common practice and was not measured here.
_MEASURED = Recipe(
    training={
        "learning_rate": 2e-3,
        "warmup_steps": 0.025,
        "lr_scheduler_type": SchedulerType.COSINE,
        "feature_loss_weight": 0.1,
        "token_loss_weight": 1.0,
        "use_glancing": False,
    },
    drafter_config={
        "block_size": 3,
        "recurrence": "token",
        "shortcut": True,
        "newest_row": True,
        "attention_bias": False,
        "transition_rank": 64,
    },
    measured_width=MEASURED_WIDTH,
)
# arXiv 2412.12639: section 3, and figures 2 (two attention blocks) and 6 (the tree). The paper's rate of 3e-5 is for
# 800,000 steps; this one suits runs of thousands of steps.
_PAPER = Recipe(
    training={
        "learning_rate": 5e-4,
        "warmup_steps": 0,
        "lr_scheduler_type": SchedulerType.LINEAR,
        "feature_loss_weight": 1.0,
        "token_loss_weight": 0.1,
        "use_glancing": True,
        "glancing_ratio": 0.4,
        "draft_tree_nodes": 0,  # the tree is given below
    },
    drafter_config={
        "block_size": 2,
        "num_hidden_layers": 2,
        "recurrence": "sequence",
        "block_position_embedding": False,
        "shortcut": False,
        "newest_row": False,
        "draft_tree": paper_tree().to_json(),
    },
)
RECIPES: dict[str, dict[str, Recipe]] = {"default": {"falcon": _MEASURED}, "paper": {"falcon": _PAPER}}


def recipe_of(name: str, method: str) -> Recipe:
    """The recipe of this name for a method; an empty one if the default has none for the method.

    Raises:
        [`OptionError`]: there is no recipe of this name, or it is not for this method.

    Example:

    ```python
    >>> recipe_of("paper", "falcon").drafter_config["recurrence"], recipe_of("default", "medusa").training
    ('sequence', {})

    ```
    """
    if name not in RECIPES:
        raise OptionError(f"`recipe` must be one of {sorted(RECIPES)}, but it is {name!r}.")
    if method not in RECIPES[name] and name != "default":
        raise OptionError(
            f"The recipe `{name}` is one for {', '.join(f'`{known}`' for known in RECIPES[name])}, but the method is "
            f"`{method}`. Leave `--recipe` out."
        )
    return RECIPES[name].get(method, Recipe())


def recipe_notes() -> dict[str, str]:
    """What recipes set each option to, by its name, for `--help`.

    Example:

    ```python
    >>> recipe_notes()["learning_rate"]
    'By recipe: 0.002 (default, falcon), 0.0005 (paper, falcon); otherwise 0.0005.'

    ```
    """
    options: dict[str, list[str]] = {}
    for name, methods in RECIPES.items():
        for method, recipe in methods.items():
            shown = (f"{name}={value}" for name, value in recipe.drafter_config.items() if name != "draft_tree")
            for option, value in {**recipe.training, "drafter_config": " ".join(shown).lower()}.items():
                options.setdefault(option, []).append(f"{getattr(value, 'value', value)} ({name}, {method})")
    others = {each.name: f"; otherwise {each.default}" for each in fields(DrafterTrainingArguments)}
    return {option: f"By recipe: {', '.join(values)}{others.get(option, '')}." for option, values in options.items()}
