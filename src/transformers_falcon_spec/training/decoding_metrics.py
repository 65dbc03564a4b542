"""Acceptance and speed-up as users get them: evaluation prompts are answered with the drafter and without."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..errors import TargetError, TrainingError
from ..generation.output import SpeculativeOutput
from ..generation.probe import probe
from ..generation.timed import Run, timed_generate
from ..generation.watch import watched_stats
from .feature_cache import FeatureCache

WARM_UP_TOKENS = 4  # written by each arm before anything is timed
GREEDY = {"do_sample": False, "num_beams": 1}


@dataclass(frozen=True)
class DecodingMetrics:
    """What was written with a drafter, and by the target alone; add those of several processes with `+`.

    Args:
        stats ([`GenerationStats`]): Counts of the texts with the drafter.
        num_tokens (`int`): New tokens of these texts.
        seconds (`float`): What they took, prefill included.
        num_plain_tokens (`int`): New tokens of the texts of the target alone.
        plain_seconds (`float`): What those took.
    """

    stats: GenerationStats = field(default_factory=GenerationStats)
    num_tokens: int = 0
    seconds: float = 0.0
    num_plain_tokens: int = 0
    plain_seconds: float = 0.0

    def __add__(self, other: "DecodingMetrics") -> "DecodingMetrics":
        """All texts of both."""
        return DecodingMetrics(
            self.stats + other.stats,
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.num_plain_tokens + other.num_plain_tokens,
            self.plain_seconds + other.plain_seconds,
        )

    def metrics(self) -> dict[str, float]:
        """`acceptance_length`, `acceptance_at_depth_<d>` and `speedup`; nothing where no step was taken.

        Length and shares are those of [`GenerationStats`]: the bonus token counts in the length, and the share of a
        depth is of the steps that kept the depth before it.
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
    """Write each prompt on, greedily, with and without the drafter in turn.

    Acceptance depends on the weights alone, the speed-up on this machine and what else runs on it. What stock drafters
    keep is counted in one more run, which is not timed.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`~transformers.PreTrainedModel`]): What [`decoding_copy`] made.
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): Most tokens to write; a text may end before.
        options (`dict`, *optional*): What `generate` must be told to use a stock drafter.
    """
    arms, total = _Arms(target, drafter, options or {}), DecodingMetrics()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)])
        order = (False, True) if number % 2 else (True, False)
        if number == 0:
            for has_drafter in order:
                arms.write(ids, WARM_UP_TOKENS, has_drafter)
        runs = {has_drafter: arms.write(ids, max_new_tokens, has_drafter) for has_drafter in order}
        drafted, plain = runs[True], runs[False]
        stats = arms.counts(ids, max_new_tokens, drafted)
        total += DecodingMetrics(stats, len(drafted.new_ids), drafted.seconds, len(plain.new_ids), plain.seconds)
    return total


class _Arms:
    """A target with and without a drafter. Stock loops may change the drafter's options; each run starts afresh."""

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel, options: Mapping[str, Any]) -> None:
        self.target, self.drafter = target, drafter
        self.arguments = {"assistant_model": drafter, **options}
        self._given = copy.deepcopy(getattr(drafter, "generation_config", None))

    def write(self, ids: Tensor, num_tokens: int, has_drafter: bool) -> Run:
        """One timed text."""
        run = timed_generate(self.target, ids, num_tokens, GREEDY, 0, **(self.arguments if has_drafter else {}))
        self._reset()
        return run

    def counts(self, ids: Tensor, num_tokens: int, run: Run) -> GenerationStats:
        """What the drafter brought to this text: as the package's loop counted, or as a second run shows."""
        if isinstance(run.output, SpeculativeOutput):
            return run.output.speculation or GenerationStats()
        stats = watched_stats(self.target, ids, num_tokens, GREEDY, 0, self.arguments)
        self._reset()
        return stats

    def _reset(self) -> None:
        if self._given is not None:
            self.drafter.generation_config = copy.deepcopy(self._given)


def check_target_can_verify(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Find out before hours of training whether an evaluation can decode.

    Raises:
        [`TrainingError`]: the target cannot verify what a drafter of this package drafts.
    """
    if isinstance(drafter, DrafterModel):
        try:
            probe(target)
        except TargetError as error:
            raise TrainingError(
                f"Evaluation decodes with the drafter. {error} To train nevertheless, set `eval_decode_prompts` to 0."
            ) from error


def decoding_copy(drafter: PreTrainedModel, target: PreTrainedModel, draft_tree: DraftTree | None) -> PreTrainedModel:
    """The drafter as it would be loaded for this target now: a copy in evaluation mode, weights in the target's dtype.

    The copy drafts what its options say, but untuned, so that no clock and no earlier text changes what is drafted. A
    drafter whose options name no tree and whose kind does not grow them drafts `draft_tree`.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): The drafter in training; stays as it is.
        target ([`~transformers.PreTrainedModel`]): The target.
        draft_tree ([`DraftTree`], *optional*): The static tree that its acceptance as measured now makes the best.
    """
    copied = copy.deepcopy(drafter).eval().requires_grad_(False)
    for name in ("forward", "_original_forward"):  # of autocast, which accelerate lays around the one of the class
        copied.__dict__.pop(name, None)
    for weight in copied.parameters():  # buffers stay: rotary frequencies are always float32
        weight.data = weight.data.to(target.dtype)
    if isinstance(copied, DrafterModel):
        options = copied.generation_config
        options.tune = False
        if draft_tree is not None and options.draft_tree is None and not copied.is_tree_dynamic:
            options.draft_tree = draft_tree.to_json()
    return copied


def prompts_before_answers(data: Any, num_prompts: int, longest: int | None) -> list[list[int]]:
    """What stands before the first answer of examples chosen evenly from `data`, as token ids.

    Args:
        data (a dataset of examples): As [`ConversationDataset`] gives them; features on disk are not read.
        num_prompts (`int`): How many; all there are where those are fewer.
        longest (`int`, *optional*): Tokens of the longest prompt that can be taken; None takes all.
    """
    examples = data.dataset if isinstance(data, FeatureCache) else data
    found: list[list[int]] = []
    for example in (examples[index] for index in range(len(examples))):
        mask = list(example["assistant_mask"])
        length = mask.index(1) if 1 in mask else 0
        if length and (longest is None or length <= longest):
            found.append(list(example["input_ids"][:length]))
    count = min(num_prompts, len(found))
    return [found[place * len(found) // count] for place in range(count)]
