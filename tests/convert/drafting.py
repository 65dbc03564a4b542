"""A converted drafter at work: converted from a folder and loaded, then drafting a chain after given tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families import VOCAB_SIZE
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget


class View:
    """A target of nothing but embeddings and head, which keeps the features that the head was given."""

    def __init__(self, embeddings: Tensor, head: Tensor, feature_dim: int) -> None:
        self.vocab_size, self.feature_dim = len(head), feature_dim
        self.embeddings, self.weight = embeddings, head
        self.read: list[Tensor] = []

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embeddings."""
        return self.embeddings[token_ids]

    def head(self, features: Tensor, rows: None = None) -> Tensor:
        """Logits of features."""
        self.read.append(features.reshape(-1, features.shape[-1]))
        return features @ self.weight.T


def converted(drafter_class: Any, source: Path, target: str | None = None) -> Any:
    """The drafter of a foreign checkpoint, in eval mode."""
    convert_checkpoint(source, source.parent / "converted", target)
    return drafter_class.from_pretrained(source.parent / "converted").eval()


def random_ids(length: int, seed: int = 3) -> Tensor:
    """Tokens `[length]`."""
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def commits(token_ids: Tensor, features: Tensor, ends: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """A text committed in parts that end at `ends`, each with the features of its new pairs."""
    starts = [0, *(end - 1 for end in ends[:-1])]
    return [(token_ids[:end], features[start : end - 1]) for start, end in zip(starts, ends, strict=True)]


@torch.no_grad()
def chain(drafter: Any, view: View, parts: list[tuple[Tensor, Tensor]], depth: int) -> list[int]:
    """Tokens of the chain drafted after several commits; each is the text so far and the features of its new pairs."""
    generator = drafter.candidate_generator(view, 10**6, torch.Generator())
    budget = DraftBudget(depths=(depth,), num_nodes=depth + 1, is_chain=True)
    for token_ids, features in parts:
        generator.commit(Committed(token_ids[None], (len(token_ids),), (len(features),), features[None]))
        view.read.clear()
        draft = generator.propose(budget)
    assert draft is not None
    assert draft.parents.tolist() == [list(range(-1, draft.parents.shape[1] - 1))]
    return draft.token_ids[0, 1:].tolist()
