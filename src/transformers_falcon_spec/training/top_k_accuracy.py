"""How often the target's best token is among the drafter's top k, by block offset."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import EvalPrediction

from .objectives import Outcome

MAX_RANK = 10  # the most likely tokens of the drafter that are counted one by one


def count_ranks(outcome: Outcome, num_offsets: int) -> Tensor:
    """Count the guesses of a batch by block offset and by the rank that the drafter gives to the target's best token.

    Returns:
        `torch.Tensor` of shape `(1, offsets, MAX_RANK + 1)`: the counts; the last column holds all lower ranks.
    """
    logits, best = outcome.draft_logits, outcome.target_logits.argmax(-1, keepdim=True)
    top = logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1)
    is_hit = (top.indices == best) & (top.values > -torch.inf)  # a token that cannot be drafted has no rank
    rank = torch.where(is_hit.any(-1), is_hit.int().argmax(-1), MAX_RANK)
    counts = torch.zeros(1, num_offsets, MAX_RANK + 1, dtype=torch.float, device=logits.device)
    counts[0].index_put_((outcome.block_offsets, rank), torch.ones_like(rank, dtype=counts.dtype), accumulate=True)
    return counts


def rank_shares(metrics: Mapping[str, float], num_offsets: int, num_ranks: int, prefix: str) -> Tensor:
    """The share of each rank at each block offset, `[offsets, ranks]`, from the metrics of an evaluation."""
    offsets, ranks = range(1, num_offsets + 1), range(num_ranks)
    shares = [[metrics[f"{prefix}_rank_{rank}_at_{offset}"] for rank in ranks] for offset in offsets]
    return torch.tensor(shares, dtype=torch.float)


def accuracy_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, top-k accuracy and the share of each rank, by block offset, from the counts of all batches."""
    counts = torch.as_tensor(prediction.predictions).sum(0)  # [offsets, ranks + 1]
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    metrics = {"accuracy": float(counts[:, 0].sum() / counts.sum())}
    for offset, row in enumerate(shares, start=1):
        metrics[f"accuracy_at_{offset}"] = float(row[0])
        metrics |= {f"top_{k}_accuracy_at_{offset}": float(row[:k].sum()) for k in (2, 4, 8)}
        metrics |= {f"rank_{rank}_at_{offset}": float(row[rank]) for rank in range(MAX_RANK)}
    return metrics
