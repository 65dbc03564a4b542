"""What a training is measured by: acceptance in decoding, and accuracies."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel

from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..errors import GenerationError, TargetError, TrainingError
from ..generation.probe import check_target
from ..generation.timed import timed_generate, watched_stats
from .objectives import Outcome

logger = logging.getLogger(__name__)

GREEDY = {"do_sample": False, "num_beams": 1}
MAX_RANK = 10  # the most likely tokens of the drafter that are counted one by one


# Decoding


def decoding_stats(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: Mapping[str, Any] | None = None,
) -> GenerationStats:
    """Decode each prompt greedily with the drafter, and return the counts of all.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`~transformers.PreTrainedModel`]): A drafter from [`decoding_copy`].
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        max_new_tokens (`int`): The most tokens to decode; a text may end earlier.
        options (`dict`, *optional*): Options that `generate` needs for a stock draft model.
    """
    arguments = {"assistant_model": drafter, **(options or {})}
    total = GenerationStats()
    given = copy.deepcopy(getattr(drafter, "generation_config", None))
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        if isinstance(drafter, DrafterModel):
            output = timed_generate(target, ids, max_new_tokens, GREEDY, 0, **arguments).output
            total += output.speculation or GenerationStats()
        else:
            total += watched_stats(target, ids, max_new_tokens, GREEDY, 0, arguments)

        if given is not None:  # the loops of Transformers may change it
            drafter.generation_config = copy.deepcopy(given)

    return total


def decoding_metrics(stats: GenerationStats) -> dict[str, float]:
    """The metrics `acceptance_length` and `acceptance_at_depth_<d>`; none if nothing was decoded.

    Length and shares are those of [`GenerationStats`]: the length includes the bonus token, and the share of a depth
    is that of the steps which kept the depth before it.
    """
    if not stats.num_steps:
        return {}

    metrics = {"acceptance_length": stats.acceptance_length}
    for depth, share in enumerate(stats.acceptance_by_depth, start=1):
        metrics[f"acceptance_at_depth_{depth}"] = share

    return metrics


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


def held_out_prompts(data: Any, num_prompts: int, longest: float) -> list[list[int]]:
    """Token ids up to the first answer of `num_prompts` examples, which are chosen evenly from `data`.

    There are fewer if fewer examples have a prompt of at most `longest` tokens. Cached features are not read.
    """
    found: list[list[int]] = []
    for example in getattr(data, "conversations", data):
        mask = list(example["assistant_mask"])
        length = mask.index(1) if 1 in mask else 0
        if 0 < length <= longest:
            found.append(list(example["input_ids"][:length]))

    if not found:
        logger.warning("No prompt of the evaluation data has at most %s tokens: none is decoded.", longest)

    count = min(num_prompts, len(found))
    return [found[number * len(found) // count] for number in range(count)]


# Accuracies


def count_ranks(outcome: Outcome, num_offsets: int) -> Tensor:
    """Count the guesses of a batch by block offset and by the rank that the drafter gives to the target's best token.

    Returns:
        `torch.Tensor` of shape `(1, offsets, MAX_RANK + 1)`: the counts; the last column holds all lower ranks.
    """
    logits = outcome.draft_logits
    best = outcome.target_logits.argmax(-1, keepdim=True)
    top = logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1)
    is_hit = (top.indices == best) & (top.values > -torch.inf)  # a token that cannot be drafted has no rank
    rank = torch.where(is_hit.any(-1), is_hit.int().argmax(-1), MAX_RANK)

    counts = torch.zeros(1, num_offsets, MAX_RANK + 1, dtype=torch.float, device=logits.device)
    counts[0].index_put_((outcome.block_offsets, rank), torch.ones_like(rank, dtype=counts.dtype), accumulate=True)
    return counts


def accuracy_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and the share of each rank, by block offset, from the counts of all batches."""
    counts = torch.as_tensor(prediction.predictions).sum(0)  # [offsets, ranks + 1]
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    metrics = {"accuracy": float(counts[:, 0].sum() / counts.sum())}
    for offset, row in enumerate(shares, start=1):
        metrics[f"accuracy_at_{offset}"] = float(row[0])
        for rank in range(MAX_RANK):
            metrics[f"rank_{rank}_at_{offset}"] = float(row[rank])

    return metrics


def rank_shares(metrics: Mapping[str, float], num_offsets: int, num_ranks: int, prefix: str) -> Tensor:
    """The share of each rank at each block offset, `[offsets, ranks]`, from the metrics of an evaluation."""
    shares = torch.zeros(num_offsets, num_ranks, dtype=torch.float)
    for offset in range(num_offsets):
        for rank in range(num_ranks):
            shares[offset, rank] = metrics[f"{prefix}_rank_{rank}_at_{offset + 1}"]

    return shares
