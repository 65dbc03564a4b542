"""Acceptance and speed-up in evaluation, measured by decoding prompts with the drafter and with the target alone."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..drafters.config_fields import context_of
from ..errors import GenerationError, TargetError, TrainingError
from ..generation.eligible import check_target
from ..generation.output import SpeculativeOutput
from ..generation.timed import Run, timed_generate, watched_stats

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 4  # decoded both ways before anything is timed
GREEDY = {"do_sample": False, "num_beams": 1}


@dataclass(frozen=True)
class DecodingMetrics:
    """Counts and times of decoding with a drafter and without; those of several processes are added with `+`."""

    stats: GenerationStats = field(default_factory=GenerationStats)  # of decoding with the drafter
    num_tokens: int = 0  # decoded with the drafter
    seconds: float = 0.0  # of these tokens, prefill included
    num_plain_tokens: int = 0  # decoded by the target alone
    plain_seconds: float = 0.0

    def __add__(self, other: "DecodingMetrics") -> "DecodingMetrics":
        """The sum over the texts of both."""
        return DecodingMetrics(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def metrics(self) -> dict[str, float]:
        """The metrics `acceptance_length`, `acceptance_at_depth_<d>` and `speedup`; none if nothing was decoded.

        Length and shares are those of [`GenerationStats`]: the length includes the bonus token, and the share of a
        depth is that of the steps which kept the depth before it.
        """
        if not self.stats.num_steps:
            return {}
        shares = enumerate(self.stats.acceptance_by_depth, start=1)
        return {
            "acceptance_length": self.stats.acceptance_length,
            **{f"acceptance_at_depth_{depth}": share for depth, share in shares},
            "speedup": self.num_tokens / self.seconds / (self.num_plain_tokens / self.plain_seconds),
        }


def measure_decoding(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: Mapping[str, Any] | None = None,
) -> DecodingMetrics:
    """Decode each prompt greedily, with the drafter and without it.

    Acceptance depends on the weights only; the speed-up depends on the machine and its other work, too. The acceptance
    of stock draft models is counted in one more run, which is not timed.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`~transformers.PreTrainedModel`]): A drafter from [`decoding_copy`].
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): The most tokens to decode; a text may end earlier.
        options (`dict`, *optional*): Options that `generate` needs for a stock draft model.
    """
    arguments = {"assistant_model": drafter, **(options or {})}

    def decode(ids: Tensor, num_tokens: int, has_drafter: bool) -> Run:
        with _options_restored(drafter):
            return timed_generate(target, ids, num_tokens, GREEDY, 0, **(arguments if has_drafter else {}))

    total = DecodingMetrics()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)])
        order = (False, True) if number % 2 else (True, False)
        if number == 0:
            for has_drafter in order:
                decode(ids, WARM_UP_TOKENS, has_drafter)
        runs = {has_drafter: decode(ids, max_new_tokens, has_drafter) for has_drafter in order}
        drafted, plain = runs[True], runs[False]
        if isinstance(drafted.output, SpeculativeOutput):
            stats = drafted.output.speculation or GenerationStats()
        else:
            with _options_restored(drafter):
                stats = watched_stats(target, ids, max_new_tokens, GREEDY, 0, arguments)
        total += DecodingMetrics(stats, len(drafted.new_ids), drafted.seconds, len(plain.new_ids), plain.seconds)
    return total


@contextmanager
def _options_restored(drafter: PreTrainedModel) -> Iterator[None]:
    """Restore the drafter's generation config after the block, for the loops of Transformers may change it."""
    before = copy.deepcopy(getattr(drafter, "generation_config", None))
    try:
        yield
    finally:
        if before is not None:
            drafter.generation_config = before


def check_target_can_verify(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Refuse, with a [`TrainingError`], a target with which evaluation cannot decode, for it cannot read drafts."""
    if isinstance(drafter, DrafterModel):
        try:
            check_target(target)
        except (TargetError, GenerationError) as error:
            raise TrainingError(
                f"Evaluation decodes with the drafter. {error} To train nevertheless, set `eval_decode_prompts` to 0."
            ) from error


def decoding_copy(drafter: PreTrainedModel, target: PreTrainedModel, draft_tree: DraftTree | None) -> PreTrainedModel:
    """A copy of the drafter for decoding: in evaluation mode, with weights in the target's dtype.

    The tuner of the copy is off, so that drafts do not depend on timing or earlier texts. If neither its options nor
    its class choose the tree, the copy drafts `draft_tree`.
    """
    copied = copy.deepcopy(drafter).eval().requires_grad_(False)
    for name in ("forward", "_original_forward"):  # the wrappers that accelerate adds for autocast
        copied.__dict__.pop(name, None)
    for weight in copied.parameters():  # but not buffers: rotary frequencies stay in float32
        weight.data = weight.data.to(target.dtype)
    if isinstance(copied, DrafterModel):
        options = copied.generation_config
        options.tune = False
        if draft_tree is not None and options.draft_tree is None and not copied.is_tree_dynamic:
            options.draft_tree = draft_tree.to_json()
    return copied


def held_out_prompts(data: Any, num_prompts: int, num_new_tokens: int, target: PreTrainedModel) -> list[list[int]]:
    """Prompts of `data` that leave room for `num_new_tokens` in the context of `target`; a warning if none does."""
    context = context_of(target.config)
    prompts = prompts_before_answers(data, num_prompts, None if context is None else context - num_new_tokens)
    if not prompts:
        logger.warning(
            "No prompt of the evaluation data leaves room for %d new tokens in the target's context of %s: nothing "
            "was decoded.", num_new_tokens, context,
        )  # fmt: skip
    return prompts


def prompts_before_answers(data: Any, num_prompts: int, longest: int | None) -> list[list[int]]:
    """Token ids up to the first answer of `num_prompts` examples, which are chosen evenly from `data`.

    There are fewer if fewer examples have a prompt of at most `longest` tokens. Cached features are not read.
    """
    examples = getattr(data, "conversations", data)
    found: list[list[int]] = []
    for example in (examples[index] for index in range(len(examples))):
        mask = list(example["assistant_mask"])
        length = mask.index(1) if 1 in mask else 0
        if length and (longest is None or length <= longest):
            found.append(list(example["input_ids"][:length]))
    count = min(num_prompts, len(found))
    return [found[number * len(found) // count] for number in range(count)]
