"""The candidates of each drafted position: the fewest tokens that hold most of the diffusion model's probability.

One denoising pass gives every position a distribution that knows nothing of its neighbours' tokens, so what can be
drafted is a lattice: a list of candidates for each position, any of which may follow any of the position before.
Source: arXiv 2510.02358, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lattice:
    """Candidates of one row at each drafted position, best first."""

    end_ids: tuple[int, ...]  # tokens that end the text
    token_ids: Tensor  # [positions, candidates] those that were pruned stand behind the rest
    log_probs: Tensor  # [positions, candidates] by the softmax over all allowed tokens; -inf where pruned
    num: Tensor  # [positions] candidates kept, at least 1
    end_log_probs: Tensor  # [positions] of the likeliest token that ends the text, kept or not

    @property
    def num_generated(self) -> int:
        """Positions before the first one whose best candidate ends the text; all of them if there is none."""
        is_end = torch.isin(self.token_ids[:, 0], self.token_ids.new_tensor(self.end_ids))
        return int((~is_end).long().cumprod(dim=0).sum())

    @property
    def length(self) -> int:
        """Positions to draft for: up to and including the first one whose best candidate ends the text."""
        return min(self.num_generated + 1, len(self.num))

    def first(self, length: int) -> "Lattice":
        """The first `length` positions."""
        tensors = (self.token_ids, self.log_probs, self.num, self.end_log_probs)
        return Lattice(self.end_ids, *(values[:length] for values in tensors))

    def cpu(self) -> "Lattice":
        """The lattice on the CPU, where it is searched."""
        tensors = (self.token_ids, self.log_probs, self.num, self.end_log_probs)
        return Lattice(self.end_ids, *(values.cpu() for values in tensors))


def prune(scores: Tensor, mass: float = 0.8, max_candidates: int = 15, end_ids: Sequence[int] = ()) -> Lattice:
    """At each position the fewest tokens that hold at least `mass`, but no more than `max_candidates`.

    A token that ends the text enters like any other: where it is the best one it is always kept.

    `scores` `[..., positions, vocab]` are those of the denoising pass, -inf at tokens that must not be drafted. A mass
    of 1 keeps `max_candidates` everywhere; the paper finds 0.8 and 15 best.

    ```python
    >>> lattice = prune(torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]).log(), mass=0.8, max_candidates=2)
    >>> lattice.token_ids.tolist(), lattice.num.tolist()
    ([[0, 1], [1, 0]], [2, 2])

    ```
    """
    scores = scores.float()
    best = scores.topk(min(max_candidates, scores.shape[-1]), dim=-1)
    total = scores.logsumexp(dim=-1, keepdim=True)
    log_probs = best.values - total
    probs = log_probs.double().exp()
    is_kept = ((probs.cumsum(dim=-1) - probs < mass) | (mass == 1)) & (log_probs > -torch.inf)
    is_kept[..., 0].fill_(True)
    ends = scores.new_full(scores.shape[:-1], -torch.inf)
    for end in end_ids:
        ends = torch.maximum(ends, scores[..., end])
    return Lattice(
        end_ids=tuple(end_ids),
        token_ids=best.indices,
        log_probs=log_probs.masked_fill(~is_kept, -torch.inf),
        num=is_kept.sum(dim=-1),
        end_log_probs=ends - total.squeeze(-1),
    )
