"""Drafting with an MTP layer: trees against Transformers' own class, which reads everything anew and knows no tree."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.drafters.mtp.makers import KINDS, WINDOW, config_of_stock, loaded, saved
from tests.drafters.texts import Text, assert_rows_draft_alone, cut, drafted, paths
from tests.drafters.trees import random_tree
from tests.growing import grown_paths
from transformers_falcon_spec import MtpDrafter, SpeculationConfig
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.generation.target import Target

AMPLE = DraftBudget((100,), 512)
ROUNDS = (3, 1, 12, 4, 1)  # new pairs before each proposal; Mellum's window ends on the way
WIDTH = 64


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class StockMtp:
    """One row of text, and what Transformers' own MTP model says of it, by whole forwards."""

    def __init__(self, target: Any) -> None:
        config = target.config
        target.config = config_of_stock(config)
        self.mtp = MtpModel.from_pretrained(target)
        target.config = config
        self.ids, self.features = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, WIDTH, dtype=torch.double)

    def commit(self, committed: Committed) -> None:
        (length,), (num_new,) = committed.lengths, committed.num_new
        self.ids = torch.cat([self.ids, committed.sequence_ids[:, length - num_new : length]], dim=-1)
        self.features = torch.cat([self.features, committed.features], dim=1)

    def probs(self, path: Sequence[int]) -> Tensor:
        """The distribution of the token after `path`, each of whose tokens is read with the state that gave it."""
        ids, states = self.ids, self.features
        for token in (*path, None):
            positions = torch.arange(1, ids.shape[1] + 1)[None]
            cache = MtpCache(config=self.mtp.config)
            newest = self.mtp.forward_layer(0, states, positions, cache, input_ids=ids)[:, -1:]
            if token is not None:
                ids, states = torch.cat([ids, torch.tensor([[token]])], -1), torch.cat([states, newest], 1)
        return self.mtp.shared_head(newest)[0, 0].softmax(-1)

    def static(self, parents: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
        """The token of every node of a static tree but the root."""
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, len(parents)):
            best = self.probs(found[parents[node]]).argsort(descending=True)
            found[node] = (*found[parents[node]], int(best[ranks[node]]))
        return {node: path[-1] for node, path in found.items() if node}


def start(drafter: MtpDrafter, target: Any) -> Any:
    return drafter.candidate_generator(Target(target, (-1,)), 1000, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_tree_is_that_of_transformers_own_layer(kind: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, kind))
    drafter = MtpDrafter.from_target(target)
    drafter.generation_config = SpeculationConfig(num_tree_nodes=9, tree_top_k=3, tree_depth=3)
    text, generator, stock = Text(width=WIDTH), start(drafter, target), StockMtp(target)

    for num_new in ROUNDS:
        committed = text.more(num_new)
        generator.commit(committed)
        stock.commit(committed)
        draft = generator.propose(AMPLE)

        assert paths(draft) == grown_paths(lambda path, _place: stock.probs(path).tolist(), 3, 3, 9)
        assert draft.num_passes == 3


def test_a_static_tree_and_a_chain_are_those_of_transformers_own_layer(tmp_path: Path) -> None:
    target, tree = loaded(saved(tmp_path, "mellum")), random_tree(3, 8, seed=3)
    drafter = MtpDrafter.from_target(target, draft_tree={"parents": tree[0], "ranks": tree[1]})
    drafter.generation_config.dynamic_tree = False
    text, generator, stock = Text(width=WIDTH), start(drafter, target), StockMtp(target)

    for num_new, budget in zip(ROUNDS, (AMPLE, DraftBudget((100,), 512, is_chain=True)) * 2, strict=False):
        committed = text.more(num_new)
        generator.commit(committed)
        stock.commit(committed)
        draft, expected = generator.propose(budget), cut(tree, budget, 1)

        assert draft.parents[0].tolist() == expected[0]
        assert drafted(draft) == stock.static(*expected)


@pytest.mark.parametrize("kind", ["mellum", "deepseek_v3"])
def test_rows_of_a_batch_draft_what_each_would_alone(kind: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, kind))
    drafter, texts = MtpDrafter.from_target(target), [Text(seed, WIDTH) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]

    assert_rows_draft_alone(together, alone, texts, [(7, 0, 2), (9, 1, 4), (1, 13, 1), (5, 0, 2), (0, 9, 1)])


def test_the_window_is_that_of_the_layer(tmp_path: Path) -> None:
    windows = {}
    for kind in KINDS:
        drafter = MtpDrafter.from_target(loaded(saved(tmp_path / kind, kind)))
        windows[kind] = drafter.sliding_window

    assert windows == dict.fromkeys(KINDS) | {"mellum": WINDOW}
