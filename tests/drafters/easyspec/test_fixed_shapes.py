"""EasySpec and small language models in fixed shapes, beyond what all drafters promise: contexts, changes, and what cannot."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import tape
from tests.drafters.easyspec.kinds import GROUPS, make_drafter, make_model
from tests.drafters.texts import paths
from tests.drafters.tree_drafting.twins import MOST_KEPT, Twins, assert_same
from transformers_falcon_spec.drafters.tree_drafting.text import LEAST_WAITING
from transformers_falcon_spec.generation.drafting import DraftBudget


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_where_the_context_ends_nothing_is_drafted() -> None:
    target = make_model("llama")
    drafter = make_drafter(target, changes={"max_position_embeddings": 90}, dynamic_tree=False, tree_depth=3)
    twins = Twins("", num_rows=2, pair=(target, drafter))
    depths = []
    while (drafts := twins.drafts((100, 100)))[0] is not None:
        assert_same(*drafts, 2)
        depths.append([max(map(len, paths(drafts[1], row))) for row in range(2)])
        twins.give((MOST_KEPT, MOST_KEPT - 1), is_kept=True)

    assert drafts == (None, None)
    assert depths[0] == [3, 3]
    assert any(min(depth) == 0 < max(depth) for depth in depths)  # one row was beyond it before the other
    for _ in range(LEAST_WAITING // MOST_KEPT + 1):  # more than may wait is read, and nothing is drafted of it
        twins.give((MOST_KEPT, MOST_KEPT), is_kept=True)
        assert twins.drafts((100, 100)) == (None, None)


def _other_groups(drafter: Any) -> None:
    drafter.config.layer_groups = [[0], [1, 2, 3, 4, 5], [6]]


def _weights_in_place(drafter: Any) -> None:
    for weight in drafter.parameters():
        weight.mul_(1.25)


@pytest.mark.parametrize("change", [_other_groups, _weights_in_place], ids=lambda each: each.__name__)
def test_nothing_is_stale_after_the_drafter_changed(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tape.install(monkeypatch)
    target = make_model("llama")
    pair = (target, make_drafter(target, tree_depth=2, layer_groups=[list(group) for group in GROUPS]))

    def draft(twins: Twins) -> None:
        for _ in range(3):
            assert_same(*twins.drafts((2,)), 1)
            twins.give((MOST_KEPT,), is_kept=True)

    first = Twins("", num_rows=1, pair=pair)
    draft(first)
    same = Twins("", num_rows=1, pair=pair, buffers=first.buffers)
    change(pair[1])
    changed = Twins("", num_rows=1, pair=pair, buffers=first.buffers)
    draft(changed)

    assert same.buffers is first.buffers is not changed.buffers


def _with_hook(drafter: Any) -> None:
    drafter.model.lm_head.register_forward_hook(lambda *_: None)


def _distributed(drafter: Any) -> None:
    drafter.config.backend = "distributed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_hook, "`lm_head` of the draft model has a hook, which a replay would leave out"),
        (_distributed, "processes exchange what layers of the draft model give"),
    ],
)
def test_a_reason_says_why_a_draft_model_cannot(change: Callable[[Any], None], reason: str) -> None:
    target = make_model("llama")
    twins = Twins("", num_rows=1, pair=(target, make_drafter(target)))
    budget = DraftBudget((4,), 8)
    assert twins.fixed.why_not_fixed(budget) is None

    change(twins.drafter)

    assert twins.fixed.why_not_fixed(budget) == reason
