"""Stand-ins for drafters: one that drafts random trees, and one that gives another drafter part of the truth."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.tiny import VOCAB_SIZE
from transformers_falcon_spec import Draft, SpeculationConfig, TreeCandidateGenerator
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget


class RandomDrafter:
    """Drafts trees of random shape with random tokens; keeps what its generators were given.

    Args:
        num_nodes (`int`): Nodes of a tree, root included.
        num_lookahead (`int`): How many of them, from the last one back, are read but must never become text.
        feature_layers (`Sequence[int]`): Hidden states to ask for.
        proposals (`float`): Share of steps with a proposal.
        wants_node_choices (`bool`): Whether to ask for the target's choices after every node.
        tune (`bool`): Whether a tuner chooses how much to draft, else every step drafts what fits.
    """

    def __init__(
        self,
        num_nodes: int = 8,
        num_lookahead: int = 0,
        feature_layers: Sequence[int] = (),
        proposals: float = 1.0,
        wants_node_choices: bool = False,
        tune: bool = True,
    ) -> None:
        self.wants_node_choices = wants_node_choices
        self.num_nodes, self.num_lookahead, self.proposals = num_nodes, num_lookahead, proposals
        self.feature_layers = tuple(feature_layers)
        self.config = SimpleNamespace(
            is_encoder_decoder=False, get_text_config=lambda: self.config, vocab_size=VOCAB_SIZE
        )
        self.generation_config = SpeculationConfig(tune=tune)
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
        super().__init__(drafter, target, max_length, rng)
        self.wants_node_choices = drafter.wants_node_choices
        self.commits: list[Committed] = []
        self.drafts: list[Draft] = []
        self.farthest = 0  # longest text that a draft could have made
        self._random = random.Random(0)

    def commit(self, committed: Committed) -> None:
        """Remember it."""
        self.commits.append(committed)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Remember the newest text of these rows alone."""
        newest = self.commits[-1]
        lengths, num_new = (tuple(each[row] for row in rows) for each in (newest.lengths, newest.num_new))
        self.commits[-1] = replace(
            newest, sequence_ids=newest.sequence_ids[list(rows)], lengths=lengths, num_new=num_new
        )

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A random tree for each row within the budget; siblings differ."""
        newest = self.commits[-1]
        reach = [length + depth for length, depth in zip(newest.lengths, budget.depths, strict=True)]
        self.farthest = max(self.farthest, *reach)
        if self._random.random() > self.drafter.proposals:
            return None
        roots = [int(ids[length - 1]) for ids, length in zip(newest.sequence_ids, newest.lengths, strict=True)]
        trees = [self._tree(root, depth, budget) for root, depth in zip(roots, budget.depths, strict=True)]
        num_nodes = max(len(parents) for parents, _ in trees)
        parents = torch.tensor([parents + [-1] * (num_nodes - len(parents)) for parents, _ in trees])
        token_ids = torch.tensor([ids + [0] * (num_nodes - len(ids)) for _, ids in trees])
        is_lookahead = torch.arange(num_nodes)[None] >= num_nodes - self.drafter.num_lookahead
        self.drafts.append(
            Draft(token_ids, parents, is_lookahead=is_lookahead if self.drafter.num_lookahead else None)
        )
        return self.drafts[-1]

    def _tree(self, root: int, max_depth: int, budget: DraftBudget) -> tuple[list[int], list[int]]:
        """Parents and tokens of one row; rows differ in size."""
        parents, depths, token_ids = [-1], [0], [root]
        num_nodes = min(self.drafter.num_nodes, budget.num_nodes, max_depth + 1 if budget.is_chain else 10**6)
        for node in range(1, num_nodes if max_depth else 1):
            open_nodes = [other for other in range(node) if depths[other] < max_depth]
            parents.append(node - 1 if budget.is_chain else self._random.choice(open_nodes))
            depths.append(depths[parents[-1]] + 1)
            taken = {token for token, parent in zip(token_ids, parents[:-1], strict=True) if parent == parents[-1]}
            token_ids.append(self._random.choice([token for token in range(VOCAB_SIZE) if token not in taken]))
        return parents, token_ids


class InformedDrafter:
    """Another drafter that knows the coming text: at each depth one child of the true node gets the true token, mostly.

    Args:
        drafter (`Any`): The drafter whose trees are corrected.
        text (`torch.Tensor` of shape `(rows, tokens)`): Prompts and continuations.
        hit_rate (`float`): How often a depth is corrected.
        mask (`torch.Tensor` of shape `(rows, prompt)`, *optional*): 0 at padding.
    """

    def __init__(
        self, drafter: Any, text: torch.Tensor, hit_rate: float = 0.8, mask: torch.Tensor | None = None
    ) -> None:
        self.drafter, self.hit_rate = drafter, hit_rate
        is_text = torch.ones_like(text, dtype=torch.bool)
        if mask is not None:
            is_text[:, : mask.shape[1]] = mask.bool()
        self.texts = [row[kept].tolist() for row, kept in zip(text, is_text, strict=True)]
        self.feature_layers, self.config = drafter.feature_layers, drafter.config
        self.generation_config = drafter.generation_config

    def check_target(self, model: Any) -> None:
        """As the inner drafter does."""
        self.drafter.check_target(model)

    def modules(self) -> Iterator[torch.nn.Module]:
        """The parts of the inner drafter, which drafts in eval mode; a double inside has none."""
        return self.drafter.modules() if isinstance(self.drafter, torch.nn.Module) else iter(())

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> "InformedGenerator":
        """A generator for one call."""
        return InformedGenerator(self, self.drafter.candidate_generator(target, max_length, rng))


class InformedGenerator(TreeCandidateGenerator):
    """The generator of [`InformedDrafter`]."""

    def __init__(self, drafter: InformedDrafter, inner: TreeCandidateGenerator) -> None:
        super().__init__(drafter, inner.target, inner.max_length, inner.rng)
        self.inner = inner
        self.wants_node_choices = inner.wants_node_choices
        self._random, self._texts = random.Random(0), drafter.texts
        self._lengths: tuple[int, ...] = ()

    def commit(self, committed: Committed) -> None:
        """Hand it on."""
        self._lengths = committed.lengths
        self.inner.commit(committed)

    @property
    def why_rows_stay(self) -> str | None:
        """As the inner generator says."""
        return self.inner.why_rows_stay

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these texts alone."""
        self._texts, self._lengths = [self._texts[row] for row in rows], tuple(self._lengths[row] for row in rows)
        self.inner.select_rows(rows)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The inner draft, corrected along one path of each row."""
        draft = self.inner.propose(budget)
        if draft is None:
            return None
        token_ids = draft.token_ids.clone()
        for row, ids in enumerate(token_ids):
            parents = draft.parents[min(row, len(draft.parents) - 1)].tolist()
            self._correct(ids, parents, self._texts[row][self._lengths[row] :])
        return replace(draft, token_ids=token_ids)

    def _correct(self, token_ids: torch.Tensor, parents: list[int], truths: list[int]) -> None:
        """Write the truth, or a part of it, into one row's tree."""
        node = 0
        for truth in truths:
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children or self._random.random() > self.drafter.hit_rate:
                break
            node = self._random.choice(children)
            for sibling in children:  # siblings must go on to differ
                if token_ids[sibling] == truth:
                    token_ids[sibling] = token_ids[node]
            token_ids[node] = truth
