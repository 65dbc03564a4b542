"""Random text with random features, committed to a generator in pieces, and what is left of a tree under a budget."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.drafters.trees import Lists
from tests.reference import path_to
from tests.tiny import VOCAB_SIZE
from transformers_falcon_spec import Draft
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget

WIDTH = 16


class Text:
    """Random text with random features, committed to both twins in pieces."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCAB_SIZE, (1, 200), generator=self.generator)
        self.features = torch.randn(1, 199, width, dtype=torch.double, generator=self.generator)
        self.num_pairs = 0

    def more(self, num_new: int) -> Committed:
        """The next pairs: token p + 1 with feature p; later tokens stand in the buffer already."""
        start, self.num_pairs = self.num_pairs, self.num_pairs + num_new
        features = self.features[:, start : self.num_pairs]
        return Committed(self.ids, (self.num_pairs + 1,), (num_new,), features)


def cut(tree: Lists, budget: DraftBudget, block_size: int) -> Lists:
    """The part of a tree that a budget allows, node by node."""
    max_depth = min(budget.depths[0], (budget.num_passes or 100) * block_size)
    kept: list[int] = []
    for node, parent in enumerate(tree[0]):
        has_sibling = any(tree[0][other] == parent for other in kept)
        is_open = parent == -1 or (parent in kept and not (budget.is_chain and has_sibling))
        if is_open and len(path_to(tree[0], node)) - 1 <= max_depth and len(kept) < budget.num_nodes:
            kept.append(node)
    return [kept.index(tree[0][node]) if node else -1 for node in kept], [tree[1][node] for node in kept]


def drafted(draft: Draft) -> dict[int, int]:
    return dict(list(enumerate(draft.token_ids[0].tolist()))[1:])


def merged(pieces: list[Committed]) -> Committed:
    """Commits of single rows as one of a batch; shorter rows are filled with what must never be read."""
    num_new = tuple(piece.num_new[0] for piece in pieces)
    features = torch.full((len(pieces), max(num_new), pieces[0].features.shape[-1]), torch.nan, dtype=torch.double)
    for row, piece in enumerate(pieces):
        features[row, : num_new[row]] = piece.features[0]
    ids = torch.cat([piece.sequence_ids for piece in pieces])
    return Committed(ids, tuple(piece.lengths[0] for piece in pieces), num_new, features.nan_to_num(1e3))


def paths(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    """Tokens from the root to each node."""
    parents, ids = draft.parents[min(row, len(draft.parents) - 1)].tolist(), draft.token_ids[row].tolist()
    nodes = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
    return [tuple(ids[above] for above in path_to(parents, node)[1:]) for node in nodes]


def assert_rows_draft_alone(
    together: Any, alone: Sequence[Any], texts: Sequence[Text], rounds: Sequence[tuple[int, ...]]
) -> None:
    """Given so many new pairs of each text a round, a generator of all rows drafts for each what one of that row drafts."""
    for number, num_new in enumerate(rounds):
        pieces = [text.more(num) for text, num in zip(texts, num_new, strict=True)]
        together.commit(merged(pieces))
        depths = tuple(100 - 98 * (number % 3 == row) for row in range(len(texts)))
        draft = together.propose(DraftBudget(depths, 512))
        for row, generator in enumerate(alone):
            generator.commit(pieces[row])
            if not num_new[row]:  # nothing to draft from
                assert paths(draft, row) == [()]
                assert draft.token_ids[row, 0] == pieces[row].sequence_ids[0, pieces[row].lengths[0] - 1]
            else:
                assert paths(draft, row) == paths(generator.propose(DraftBudget(depths[row : row + 1], 512)))
