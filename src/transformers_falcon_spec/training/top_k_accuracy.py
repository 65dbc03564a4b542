"""At which rank of the drafter's list the target's best token stands, by place of a draft: counts of a batch, shares of an evaluation."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import EvalPrediction

from .objectives import Outcome

MAX_RANK = 10  # ranks of the drafter's list whose acceptance is measured


def count_ranks(outcome: Outcome, num_places: int) -> Tensor:
    """`[1, places, MAX_RANK + 1]` rows by place and rank of the target's best token; the last column is beyond the list."""
    logits, best = outcome.draft_logits, outcome.target_logits.argmax(-1, keepdim=True)
    listed = logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1)
    is_hit = (listed.indices == best) & (listed.values > -torch.inf)  # what cannot be drafted has no rank
    rank = torch.where(is_hit.any(-1), is_hit.int().argmax(-1), MAX_RANK)
    counts = torch.zeros(1, num_places, MAX_RANK + 1, dtype=torch.float, device=logits.device)
    counts[0].index_put_((outcome.places, rank), torch.ones_like(rank, dtype=counts.dtype), accumulate=True)
    return counts


def rank_shares(metrics: Mapping[str, float], num_places: int, num_ranks: int, prefix: str) -> Tensor:
    """The share of each rank at each place of a block, `[places, ranks]`, as an evaluation found them."""
    return torch.tensor(
        [
            [metrics[f"{prefix}_rank_{rank}_at_{place + 1}"] for rank in range(num_ranks)]
            for place in range(num_places)
        ],
        dtype=torch.float,
    )


def accuracy_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy by block position, top-k accuracy, and the share of each rank, from the counts of all batches."""
    counts = torch.as_tensor(prediction.predictions).sum(0)  # [k, ranks + 1]
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    metrics = {"accuracy": float(counts[:, 0].sum() / counts.sum())}
    for place, row in enumerate(shares, start=1):
        metrics[f"accuracy_at_{place}"] = float(row[0])
        metrics |= {f"top_{top}_accuracy_at_{place}": float(row[:top].sum()) for top in (2, 4, 8)}
        metrics |= {f"rank_{rank}_at_{place}": float(row[rank]) for rank in range(MAX_RANK)}
    return metrics
