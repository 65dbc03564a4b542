"""Tiny random targets of many families, and drafters for them: seeded, offline, built in milliseconds.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families import BESIDE, FAMILIES, NEWER, VOCAB_SIZE

PEAKEDNESS = 12.0  # weights this much larger than initialised: the likeliest token has about 0.25 instead of 0.01

# A part of the table, for tests that need many kinds of target but not every family.
TREE_FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere", "granite", "minicpm3", "llama4"),
    *("gpt2", "gpt_neox", "opt"),
)
CHAIN_FAMILIES = ("bloom", "gpt_neo", "mpt", "falcon_alibi")


def make_target(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh target in eval mode, with peaked logits and no EOS among its generation defaults; `changes` go to its config."""
    row = (FAMILIES | NEWER | BESIDE)[family]
    config = getattr(transformers, row.config)(**{**row.fields, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peaked(AutoModelForCausalLM.from_config(config))


def peaked(target: PreTrainedModel) -> PreTrainedModel:
    """`target` in eval mode, its logits peaked and its text without an end."""
    with torch.no_grad():
        for name, weight in target.named_parameters():
            steers_state = target._is_stateful and any(part in name for part in ("A_log", "conv", "dt_"))
            if weight.dim() >= 2 and not steers_state:  # a state that grows without bound is all rounding
                weight.mul_(PEAKEDNESS)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.eval()


def in_double(target: PreTrainedModel) -> PreTrainedModel:
    """`target` in double precision, where ties do not occur; grouped products of experts know no such type."""
    if target._can_set_experts_implementation():
        target.set_experts_implementation("eager")
    return target.double()


def make_drafter(target: PreTrainedModel, seed: int = 1, **options: Any) -> Any:
    """A Falcon drafter for `target` in its dtype, in eval mode; `options` are fields of `FalconSpecConfig`.

    Its matrices are all drawn but for the transition's.
    """
    from transformers_falcon_spec import FalconSpecDrafter  # noqa: PLC0415  see the head of this file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = FalconSpecDrafter.from_target(target, **options)
        torch.manual_seed(seed)
        return with_all_drawn(drafter).to(target.dtype).eval()


def make_eagle(target: Any, **options: Any) -> Any:
    """A fresh Eagle drafter for `target`, its matrices all drawn; `options` as `EagleDrafter.from_target` takes them.

    `draft_ids` are the tokens that it can draft.
    """
    from transformers_falcon_spec import EagleDrafter  # noqa: PLC0415  see the head of this file

    return with_all_drawn(with_list(EagleDrafter.from_target, target, **options))


def with_list(make: Any, target: Any, draft_ids: Any = None, **options: Any) -> Any:
    """A drafter that `make` makes, which can draft the tokens `draft_ids` alone; None: all of them."""
    if draft_ids is None:
        return make(target, **options)

    drafter = make(target, draft_vocab_size=len(draft_ids), **options)
    drafter.set_draft_vocabulary(draft_ids)
    return drafter


def with_all_drawn(drafter: Any) -> Any:
    """`drafter`, whose matrices that start at zero are drawn as all others: nothing before a zero shows in a draft."""
    drawn = dict(type(drafter)(drafter.config).named_parameters())
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "transition" not in name and weight.dim() > 1 and not weight.any():
                weight.copy_(drawn[name])
    return drafter


def make_prompt(length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random ids `[1, length]` without special tokens."""
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))
