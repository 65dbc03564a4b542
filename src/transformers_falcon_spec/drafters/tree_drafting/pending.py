"""Pairs of feature and token that wait until the drafter reads them."""

import torch
from torch import Tensor


class PendingPairs:
    """Pairs of one row that the drafter has not read yet."""

    def __init__(self) -> None:
        self.token_ids: list[Tensor] = []
        self.features: list[Tensor] = []
        self.root = torch.empty(0, dtype=torch.long)  # [1] newest committed token
        self.num_taken = 0
        self.num_waiting = 0  # pairs, those of the first commit left out

    def add(self, token_ids: Tensor, features: Tensor, root: Tensor) -> None:
        """Pairs of a commit; maybe none."""
        self.num_waiting += len(token_ids) if self.token_ids or self.num_taken else 0
        self.token_ids.append(token_ids)
        self.features.append(features)
        self.root = root

    def take(self, most: int) -> tuple[Tensor, Tensor]:
        """The newest pairs that wait, `most` at most, in order; none waits any longer, and `num_taken` counts all."""
        token_ids, features = torch.cat(self.token_ids), torch.cat(self.features)
        self.token_ids, self.features, self.num_taken, self.num_waiting = [], [], len(token_ids), 0
        return token_ids[-most:], features[-most:]

    def keep_newest(self, num: int) -> None:
        """Forget all but the newest `num` that wait."""
        self.token_ids = [torch.cat(self.token_ids)[-num:]]
        self.features = [torch.cat(self.features)[-num:]]
        self.num_waiting = 0
