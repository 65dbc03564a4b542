"""Acceptance and speed-up in evaluation, measured by decoding prompts with the drafter and with the target alone."""

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
from ..generation.timed import Run, timed_generate, watched_stats
from .feature_cache import FeatureCache

WARM_UP_TOKENS = 4  # decoded both ways before anything is timed
GREEDY = {"do_sample": False, "num_beams": 1}


@dataclass(frozen=True)
class DecodingMetrics:
    """Counts and times of decoding with a drafter and without; those of several processes are added with `+`.

    Args:
        stats ([`GenerationStats`]): Counts of decoding with the drafter.
        num_tokens (`int`): Tokens decoded with the drafter.
        seconds (`float`): Time of decoding with the drafter, prefill included.
        num_plain_tokens (`int`): Tokens decoded by the target alone.
        plain_seconds (`float`): Time of decoding by the target alone.
    """

    stats: GenerationStats = field(default_factory=GenerationStats)
    num_tokens: int = 0
    seconds: float = 0.0
    num_plain_tokens: int = 0
    plain_seconds: float = 0.0

    def __add__(self, other: "DecodingMetrics") -> "DecodingMetrics":
        """The sum over the texts of both."""
        return DecodingMetrics(
            self.stats + other.stats,
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.num_plain_tokens + other.num_plain_tokens,
            self.plain_seconds + other.plain_seconds,
        )

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
    decoder, total = _TimedDecoder(target, drafter, options or {}), DecodingMetrics()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)])
        order = (False, True) if number % 2 else (True, False)
        if number == 0:
            for has_drafter in order:
                decoder.decode(ids, WARM_UP_TOKENS, has_drafter)
        runs = {has_drafter: decoder.decode(ids, max_new_tokens, has_drafter) for has_drafter in order}
        drafted, plain = runs[True], runs[False]
        stats = decoder.count(ids, max_new_tokens, drafted)
        total += DecodingMetrics(stats, len(drafted.new_ids), drafted.seconds, len(plain.new_ids), plain.seconds)
    return total


class _TimedDecoder:
    """Decodes with a drafter and without.

    The loops of Transformers may change the drafter's generation config, so it is restored after each run.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel, options: Mapping[str, Any]) -> None:
        self.target, self.drafter = target, drafter
        self.arguments = {"assistant_model": drafter, **options}
        self._generation_config = copy.deepcopy(getattr(drafter, "generation_config", None))

    def decode(self, ids: Tensor, num_tokens: int, has_drafter: bool) -> Run:
        """Decode one text and time it."""
        run = timed_generate(self.target, ids, num_tokens, GREEDY, 0, **(self.arguments if has_drafter else {}))
        self._reset()
        return run

    def count(self, ids: Tensor, num_tokens: int, run: Run) -> GenerationStats:
        """The counts of a text, from the loop of this package or from a second, watched run of another loop."""
        if isinstance(run.output, SpeculativeOutput):
            return run.output.speculation or GenerationStats()
        stats = watched_stats(self.target, ids, num_tokens, GREEDY, 0, self.arguments)
        self._reset()
        return stats

    def _reset(self) -> None:
        if self._generation_config is not None:
            self.drafter.generation_config = copy.deepcopy(self._generation_config)


def check_target_can_verify(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Check before the training whether the target can read the trees that evaluation will decode with.

    Raises:
        [`TrainingError`]: the target can read neither trees nor chains.
    """
    if isinstance(drafter, DrafterModel):
        try:
            probe(target)
        except TargetError as error:
            raise TrainingError(
                f"Evaluation decodes with the drafter. {error} To train nevertheless, set `eval_decode_prompts` to 0."
            ) from error


def decoding_copy(drafter: PreTrainedModel, target: PreTrainedModel, draft_tree: DraftTree | None) -> PreTrainedModel:
    """A copy of the drafter for decoding: in evaluation mode, with weights in the target's dtype.

    The tuner of the copy is off, so that drafts do not depend on timing or earlier texts. If neither its options nor
    its class choose the tree, the copy drafts `draft_tree`.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): The drafter in training; it stays as it is.
        target ([`~transformers.PreTrainedModel`]): The target.
        draft_tree ([`DraftTree`], *optional*): The best static tree for the drafter's present acceptance.
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


def prompts_before_answers(data: Any, num_prompts: int, longest: int | None) -> list[list[int]]:
    """Token ids up to the first answer of examples, which are chosen evenly from `data`.

    Args:
        data (a dataset of examples): The examples of a [`ConversationDataset`] or a [`FeatureCache`], whose features
            are not read.
        num_prompts (`int`): The number of prompts; fewer if there are fewer.
        longest (`int`, *optional*): The most tokens that a prompt may have.
    """
    examples = data.dataset if isinstance(data, FeatureCache) else data
    found: list[list[int]] = []
    for example in (examples[index] for index in range(len(examples))):
        mask = list(example["assistant_mask"])
        length = mask.index(1) if 1 in mask else 0
        if length and (longest is None or length <= longest):
            found.append(list(example["input_ids"][:length]))
    count = min(num_prompts, len(found))
    return [found[number * len(found) // count] for number in range(count)]
