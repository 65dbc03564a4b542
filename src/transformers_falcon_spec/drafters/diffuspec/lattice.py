"""The candidates of each drafted position: the fewest tokens that hold most of the diffusion model's probability.

One denoising pass gives every position a distribution that knows nothing of its neighbours' tokens, so what can be
drafted is a lattice: a list of candidates for each position, any of which may follow any of the position before.
Source: arXiv 2510.02358, section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OptionError


@dataclass(frozen=True)
class Lattice:
    """Candidates of each row at each drafted position, best first.

    Args:
        token_ids (`torch.Tensor` of shape `(rows, positions, candidates)`): Tokens, int64; those that were pruned
            stand behind the rest.
        log_probs (`torch.Tensor` of shape `(rows, positions, candidates)`):
            What the softmax over all allowed tokens gives them, float32; -inf where pruned.
        num (`torch.Tensor` of shape `(rows, positions)`): Candidates kept, at least 1.
        end_log_probs (`torch.Tensor` of shape `(rows, positions)`): What the likeliest token that ends the text gets,
            kept or not.
        end_ids (`tuple[int, ...]`): Tokens that end the text.
    """

    token_ids: Tensor
    log_probs: Tensor
    num: Tensor
    end_log_probs: Tensor
    end_ids: tuple[int, ...] = ()

    @property
    def num_generated(self) -> Tensor:
        """`[rows]` positions before the first one whose best candidate ends the text; all of them if there is none."""
        is_end = torch.isin(self.token_ids[..., 0], self.token_ids.new_tensor(self.end_ids))
        return (~is_end).long().cumprod(dim=-1).sum(dim=-1)

    @property
    def lengths(self) -> Tensor:
        """`[rows]` positions to draft for: up to and including the first one whose best candidate ends the text."""
        return (self.num_generated + 1).clamp(max=self.num.shape[1])

    @property
    def confidences(self) -> Tensor:
        """`[rows, positions]` the probability of the best candidate."""
        return self.log_probs[..., 0].exp()

    def row(self, number: int, length: int | None = None) -> "Lattice":
        """One row, or its first `length` positions, as a lattice of one row."""
        return self._each(lambda values: values[number : number + 1, :length])

    def cpu(self) -> "Lattice":
        """The lattice on the CPU, where it is searched."""
        return self._each(Tensor.cpu)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Lattice":
        tensors = (self.token_ids, self.log_probs, self.num, self.end_log_probs)
        token_ids, log_probs, num, end_log_probs = map(change, tensors)
        return Lattice(token_ids, log_probs, num, end_log_probs, self.end_ids)


def prune(
    logits: Tensor,
    tau: float = 0.8,
    max_candidates: int = 15,
    end_ids: Sequence[int] = (),
) -> Lattice:
    """At each position the fewest tokens whose mass is at least `tau`, but no more than `max_candidates`.

    A token that ends the text enters like any other: where it is the best one it is always kept.

    Args:
        logits (`torch.Tensor` of shape `(rows, positions, vocab)`): Of the denoising pass; row i drafts the token of
            position i.
        tau (`float`): Mass to keep; 1 keeps `max_candidates` everywhere. The paper finds 0.8 best.
        max_candidates (`int`): Most candidates of a position; the paper finds 15 best.
        end_ids (`Sequence[int]`): Tokens that end the text.

    Raises:
        [`OptionError`]: `tau` is no share, `max_candidates` is below 1, or there is no position to draft for.

    Example:

    ```python
    >>> logits = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]]).log()
    >>> lattice = prune(logits, tau=0.8, max_candidates=2)
    >>> lattice.token_ids.tolist(), lattice.num.tolist()
    ([[[0, 1], [1, 0]]], [[2, 2]])

    ```
    """
    if not 0 < tau <= 1 or max_candidates < 1:
        raise OptionError(
            f"`tau` must be above 0 and at most 1, and `max_candidates` at least 1, but they are {tau} and "
            f"{max_candidates}."
        )
    if not logits.shape[1]:
        raise OptionError("A lattice must have at least 1 position, but the draft length is 0. Draft nothing instead.")
    scores = logits.float()  # -inf at tokens that must not be drafted
    best = scores.topk(min(max_candidates, scores.shape[-1]), dim=-1)
    mass = scores.logsumexp(dim=-1, keepdim=True)
    log_probs = best.values - mass
    probs = log_probs.double().exp()
    is_kept = ((probs.cumsum(dim=-1) - probs < tau) | (tau == 1)) & (log_probs > -torch.inf)
    is_kept[..., 0] = True
    ends = scores[..., list(end_ids)].amax(dim=-1) if end_ids else scores.new_full(scores.shape[:2], -torch.inf)
    return Lattice(
        token_ids=best.indices,
        log_probs=log_probs.masked_fill(~is_kept, -torch.inf),
        num=is_kept.sum(dim=-1),
        end_log_probs=ends - mass.squeeze(-1),
        end_ids=tuple(end_ids),
    )
