"""Tuning in the real loop: whatever it chooses the text is the target's own, and the output says what it chose."""

import random
from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import batch_and_drafted
from tests.drafters.eagle.kinds import make_eagle, make_eagle_target
from tests.drafters.texts import Text, paths
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters import pairs
from transformers_falcon_spec.generation.candidates import DraftBudget, Prices
from transformers_falcon_spec.generation.knowledge import WARM_UP, Knowledge
from transformers_falcon_spec.generation.target import Target

MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampling": runs.SAMPLING}
KINDS = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
}


class Fickle(Knowledge):
    """Pauses and prices that change with every step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def is_next_plain(self) -> bool:
        self.prices = None
        return self.random.random() < 0.3

    def new_prices(self, num_nodes: int) -> Prices:
        price = self.random.choice([0.0, 1e-4, 1e-3, 0.01, 0.1])
        return Prices(
            torch.arange(num_nodes) * price,
            [self.random.choice([0.0, 0.1, 9.0])] * 40,
            [1.0] * 40,
            torch.ones(33),
            self.random.choice([0, 6]),
        )


@pytest.mark.tuned
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic_tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own_whatever_is_chosen(
    kind: str, dynamic_tree: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_eagle_target()
    drafter = KINDS[kind](target)
    drafter.generation_config = SpeculationConfig(dynamic_tree=dynamic_tree)
    monkeypatch.setattr("transformers_falcon_spec.generation.tuning.knowledge_of", lambda *_: (Fickle(3),))
    monkeypatch.setattr(pairs, "MOST_WAITING", 3)

    pair = runs.both(target, drafter, make_prompt(5), max_new_tokens=60, **MODES[mode])

    pair.assert_equal()
    assert len(pair.stats.tuning["steps_by_nodes"]) >= 3
    if mode == "greedy":
        batch_and_drafted(target, drafter).assert_equal()


@pytest.mark.tuned
def test_the_output_says_what_was_chosen_and_why() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)

    stats = runs.both(target, drafter, make_prompt(5), max_new_tokens=40, do_sample=False).stats

    tuning = stats.tuning
    assert sum(tuning["steps_by_nodes"].values()) == sum(tuning["steps_by_passes"].values()) == stats.num_steps
    assert tuning["steps_by_passes"][0] >= sum(not num_passes for _, num_passes in WARM_UP)
    assert tuning["read_seconds"]["1"] > 0
    assert "the target reads nodes: 1 in" in tuning["why"]
    assert 0 < stats.read_seconds < stats.verify_seconds
    assert stats.to_json()["tuning"] == tuning


@pytest.mark.tuned
def test_the_next_call_goes_on_from_what_was_learned() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    for _ in range(2):
        tuning = runs.both(target, drafter, make_prompt(5), max_new_tokens=40, do_sample=False).stats.tuning

    assert tuning["steps_by_passes"].get(0, 0) > len(WARM_UP)  # a drafter without training is not asked again soon


@pytest.mark.tuned
@pytest.mark.parametrize(
    ("options", "is_tuned"),
    [
        ({}, True),
        ({"tune": False}, False),
        ({"verifier": "traversal"}, False),
        ({"verifier": "traversal", "deterministic": False}, True),
        ({"verifier": "gumbel"}, False),
    ],
)
def test_what_could_change_the_text_is_tuned_only_on_request(options: dict[str, Any], is_tuned: bool) -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(**options)

    output = runs.drafted(target, drafter, make_prompt(5), max_new_tokens=12, **runs.SAMPLING)

    assert bool(output.speculation.tuning) is is_tuned


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_after_a_long_wait_the_newest_pairs_are_the_whole_history(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_eagle_target()
    target, drafter = Target(model, (-1,)), KINDS[kind](model)
    budget = DraftBudget((100,), 9)
    text, generator = Text(), drafter.candidate_generator(target, 1000, torch.Generator())
    generator.commit(text.more(9))
    generator.propose(budget)
    monkeypatch.setattr(pairs, "MOST_WAITING", 6)

    for _ in range(8):
        generator.commit(text.more(1))

    fresh = drafter.candidate_generator(target, 1000, torch.Generator())
    start = text.num_pairs - 7  # the seventh one that waited was one too many: six are left, and one came after
    newest, text.num_pairs = text.num_pairs, start
    fresh.commit(text.more(newest - start))
    assert paths(generator.propose(budget)) == paths(fresh.propose(budget))
    assert generator.num_read == [7]


@torch.no_grad()
def test_a_first_text_is_read_whole_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_eagle_target()
    drafter = KINDS["falcon"](model)
    text, generator = Text(), drafter.candidate_generator(Target(model, (-1,)), 1000, torch.Generator())
    monkeypatch.setattr(pairs, "MOST_WAITING", 6)

    generator.commit(text.more(40))
    generator.commit(text.more(1))
    generator.propose(DraftBudget((100,), 9))

    assert generator.num_read == [41]
