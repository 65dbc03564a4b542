"""A drafter of every kind for one tiny target, each with dropout wherever it can have some.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

from collections.abc import Callable
from typing import Any

import peft
import torch

from tests.doubles import InformedDrafter
from tests.tiny import make_drafter, make_eagle, peaked, with_all_drawn

DROPOUT = 0.5
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": DROPOUT}


def _falcon(target: Any, **options: Any) -> Any:
    return make_drafter(
        target, **{"block_size": 2, "recurrent_dropout": DROPOUT, "attention_dropout": DROPOUT, **options}
    )


def _eagle(target: Any, **options: Any) -> Any:
    return make_eagle(target, attention_dropout=DROPOUT, **options)


def _parallel_eagle(target: Any) -> Any:
    from transformers_falcon_spec import ParallelEagleDrafter  # noqa: PLC0415

    sizes = {"num_hidden_layers": 2, "block_size": 3, "feature_layers": (1, -1), "attention_dropout": DROPOUT}
    return with_all_drawn(ParallelEagleDrafter.from_target(target, **sizes))


def _medusa(target: Any, **options: Any) -> Any:
    from transformers_falcon_spec import MedusaDrafter  # noqa: PLC0415

    return MedusaDrafter.from_target(target, num_heads=2, **options)


def _lookahead(target: Any) -> Any:
    from transformers_falcon_spec import LookaheadDrafter  # noqa: PLC0415

    return LookaheadDrafter.from_target(target)


def _layer_parallel(target: Any) -> Any:
    from transformers_falcon_spec import LayerParallelDrafter  # noqa: PLC0415
    from transformers_falcon_spec.drafters.autoregressive import make_draft_model  # noqa: PLC0415

    model = make_draft_model(target, num_hidden_layers=3, attention_dropout=DROPOUT)
    return LayerParallelDrafter.wrap(peaked(model), target, group_size=2)


def _diffusion(target: Any, **options: Any) -> Any:
    from transformers_falcon_spec import DiffusionDrafter  # noqa: PLC0415

    sizes = {"num_hidden_layers": 1, "attention_dropout": DROPOUT, "block_size": 3}
    return DiffusionDrafter.from_target(target, **sizes, **options)


def _dflash(target: Any, **options: Any) -> Any:
    from transformers_falcon_spec import DFlashDrafter  # noqa: PLC0415

    sizes = {"num_hidden_layers": 1, "attention_dropout": DROPOUT, "block_size": 4, "target_layer_ids": [0]}
    return DFlashDrafter.from_target(target, **sizes, **options)


KINDS: dict[str, Callable[[Any], Any]] = {
    "falcon": _falcon,
    "falcon, a state at each token": lambda target: _falcon(target, recurrence="token", shortcut=True),
    "eagle-1": _eagle,
    "eagle-3": lambda target: _eagle(target, version=3, feature_layers=(1, -1)),
    "p-eagle": _parallel_eagle,
    "medusa": _medusa,
    "medusa, heads of its own": lambda target: _medusa(target, has_lm_heads=True),
    "dflash": _dflash,
    "lookahead": _lookahead,
    "layers in parallel": _layer_parallel,
    "diffusion": _diffusion,
    "diffusion, trees": lambda target: _diffusion(target, search="tree"),
    "with an adapter": lambda target: peft.get_peft_model(_falcon(target), peft.LoraConfig(**LORA)),
}


def every_drafter(kind: str, target: Any) -> Any:
    """A fresh drafter of this kind, as its makers return it, in the target's type; nothing is drawn from the global stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return KINDS[kind](target).to(target.dtype)


def informed_of(drafter: Any, text: torch.Tensor) -> InformedDrafter:
    """The drafter, which knows part of `text`, so that some of its drafts are kept; its own passes run as ever."""
    return InformedDrafter(drafter, text)
