"""Stand-ins for drafters: one that drafts random trees, and one that tells another drafter part of the truth."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.tiny import VOCAB_SIZE
from transformers_falcon_spec import Draft, SpeculationConfig, TreeCandidateGenerator
from transformers_falcon_spec.generation.candidates import Committed, DraftBudget


class RandomDrafter:
    """Drafts trees of random shape with random tokens; keeps what each of its generators was told.

    Args:
        num_nodes (`int`): Nodes of a tree, root included.
        num_guests (`int`): How many of them, from the last one back, are read but must never become text.
        feature_layers (`Sequence[int]`): Hidden states to ask for.
        proposals (`float`): Share of steps with a proposal.
    """

    def __init__(
        self, num_nodes: int = 8, num_guests: int = 0, feature_layers: Sequence[int] = (), proposals: float = 1.0
    ) -> None:
        self.num_nodes, self.num_guests, self.proposals = num_nodes, num_guests, proposals
        self.feature_layers = tuple(feature_layers)
        self.config = SimpleNamespace(
            is_encoder_decoder=False, get_text_config=lambda: self.config, vocab_size=VOCAB_SIZE
        )
        self.generation_config = SpeculationConfig()
        self.generators: list[RandomGenerator] = []

    def check_target(self, model: Any) -> None:
        """Any target will do."""

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> "RandomGenerator":
        """A generator for one call."""
        self.generators.append(RandomGenerator(self, target, max_length, rng))
        return self.generators[-1]


class RandomGenerator(TreeCandidateGenerator):
    """The generator of [`RandomDrafter`]."""

    def __init__(self, drafter: RandomDrafter, target: Any, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter, self.feature_layers = drafter, drafter.feature_layers
        self.commits: list[Committed] = []
        self.farthest = 0  # longest text that a draft could have made
        self._random = random.Random(0)

    def commit(self, committed: Committed) -> None:
        """Remember it."""
        self.commits.append(committed)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A random tree within the budget; siblings differ."""
        self.farthest = max(self.farthest, self.commits[-1].lengths[0] + budget.depths[0])
        if self._random.random() > self.drafter.proposals:
            return None
        parents, depths, token_ids = [-1], [0], [int(self.commits[-1].sequence_ids[0, -1])]
        num_nodes = min(self.drafter.num_nodes, budget.num_nodes, budget.depths[0] + 1 if budget.is_chain else 10**6)
        for node in range(1, num_nodes):
            open_nodes = [other for other in range(node) if depths[other] < budget.depths[0]]
            parents.append(node - 1 if budget.is_chain else self._random.choice(open_nodes))
            depths.append(depths[parents[-1]] + 1)
            taken = {token for token, parent in zip(token_ids, parents[:-1], strict=True) if parent == parents[-1]}
            token_ids.append(self._random.choice([token for token in range(VOCAB_SIZE) if token not in taken]))
        guests = (
            torch.arange(num_nodes)[None] >= num_nodes - self.drafter.num_guests if self.drafter.num_guests else None
        )
        return Draft(torch.tensor([token_ids]), torch.tensor([parents]), is_guest=guests)


class InformedDrafter:
    """Another drafter, told the coming text: at each depth one child of the true node gets the true token, mostly.

    Args:
        drafter (`Any`): The drafter whose trees are corrected.
        text (`torch.Tensor` of shape `(1, tokens)`): Prompt and continuation.
        hit_rate (`float`): How often a depth is corrected.
    """

    def __init__(self, drafter: Any, text: torch.Tensor, hit_rate: float = 0.8) -> None:
        self.drafter, self.text, self.hit_rate = drafter, text[0].tolist(), hit_rate
        self.feature_layers, self.config = drafter.feature_layers, drafter.config
        self.generation_config = drafter.generation_config

    def check_target(self, model: Any) -> None:
        """As the inner drafter does."""
        self.drafter.check_target(model)

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> "InformedGenerator":
        """A generator for one call."""
        return InformedGenerator(self, self.drafter.candidate_generator(target, max_length, rng))


class InformedGenerator(TreeCandidateGenerator):
    """The generator of [`InformedDrafter`]."""

    def __init__(self, drafter: InformedDrafter, inner: TreeCandidateGenerator) -> None:
        super().__init__(inner.target, inner.max_length, inner.rng)
        self.drafter, self.inner, self.feature_layers = drafter, inner, drafter.feature_layers
        self._random = random.Random(0)
        self._length = 0

    def commit(self, committed: Committed) -> None:
        """Hand it on."""
        self._length = committed.lengths[0]
        self.inner.commit(committed)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The inner draft, corrected along one path."""
        draft = self.inner.propose(budget)
        if draft is None:
            return None
        token_ids, parents = draft.token_ids.clone(), draft.parents[0].tolist()
        node = 0
        for truth in self.drafter.text[self._length :]:
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children or self._random.random() > self.drafter.hit_rate:
                break
            node = self._random.choice(children)
            for sibling in children:  # siblings must go on to differ
                if token_ids[0, sibling] == truth:
                    token_ids[0, sibling] = token_ids[0, node]
            token_ids[0, node] = truth
        return Draft(token_ids, draft.parents, draft.is_guest, num_passes=draft.num_passes)
