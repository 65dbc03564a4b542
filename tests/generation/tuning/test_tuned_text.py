"""Tuning in the real loop: whatever it chooses the text is the target's own, and the output says what it chose."""

import random
from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import batch_and_drafted
from tests.clock import HandClock
from tests.doubles import InformedDrafter, RandomDrafter, RandomGenerator
from tests.drafters.eagle.kinds import make_eagle, make_eagle_target
from tests.drafters.texts import Text, paths
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters.falcon import FalconCandidateGenerator
from transformers_falcon_spec.drafters.tree_drafting import proposing
from transformers_falcon_spec.generation import tuning
from transformers_falcon_spec.generation.drafting import DraftBudget, Prices
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.generation.tuning import LEAST_STEPS, PAUSE, WARM_UP, CostModel

MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampling": runs.SAMPLING}
KINDS = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
}


class Fickle(CostModel):
    """Pauses and prices that change with every step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def is_next_plain(self) -> bool:
        self.prices = None
        return self.random.random() < 0.3

    def next_fixed_size(self, num_nodes: int) -> int:
        return self.random.choice([1, 2, num_nodes])

    def new_prices(self, num_nodes: int) -> Prices:
        price = self.random.choice([0.0, 1e-4, 1e-3, 0.01, 0.1])
        return Prices(
            torch.arange(num_nodes) * price,
            [self.random.choice([0.0, 0.1, 9.0])] * 40,
            [1.0] * 40,
            torch.ones(33),
            self.random.choice([0, 6]),
        )


def make_dear(generator: Any, clock: HandClock, patch: pytest.MonkeyPatch) -> None:
    """A draft takes as long as nine plain steps."""
    propose = generator.propose

    def dear(self: Any, budget: DraftBudget) -> Any:
        clock.now += 9.0
        return propose(self, budget)

    patch.setattr(generator, "propose", dear)


@pytest.mark.parametrize(
    ("capture", "kind", "dynamic_tree", "mode"),  # any three of them in all their ways
    [
        ("auto", "falcon", False, "greedy"),
        ("auto", "falcon", True, "sampling"),
        pytest.param("auto", "eagle", False, "sampling", marks=pytest.mark.families),
        pytest.param("auto", "eagle", True, "greedy", marks=pytest.mark.families),
        pytest.param(True, "falcon", False, "sampling", marks=pytest.mark.families),
        pytest.param(True, "falcon", True, "greedy", marks=pytest.mark.families),
        pytest.param(True, "eagle", False, "greedy", marks=pytest.mark.families),
        pytest.param(True, "eagle", True, "sampling", marks=pytest.mark.families),
    ],
)
def test_the_text_is_the_targets_own_whatever_is_chosen(
    capture: bool | str, kind: str, dynamic_tree: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_eagle_target()
    drafter = KINDS[kind](target)
    drafter.generation_config = SpeculationConfig(dynamic_tree=dynamic_tree, capture=capture)
    monkeypatch.setattr("transformers_falcon_spec.generation.tuning.cost_model_of", lambda *_: Fickle(3))
    monkeypatch.setattr(proposing, "MOST_WAITING", 3)

    pair = runs.both(target, drafter, make_prompt(5), max_new_tokens=60, **MODES[mode])

    pair.assert_equal(is_kept=False)
    runs.informed(target, drafter, make_prompt(5), max_new_tokens=60, **MODES[mode]).assert_equal()
    assert len(pair.stats.tuning["steps_by_nodes"]) >= 3
    if mode == "greedy":
        batch_and_drafted(target, drafter).assert_equal()


def test_temperatures_are_known_in_tenths_so_that_a_server_of_any_does_not_learn_for_each() -> None:
    target, drafter = make_target(), RandomDrafter()
    options = [{"temperature": value} for value in (0.7, 0.71, 1.3, 1.28, 0.74)]

    for each in ({"do_sample": False}, *({"do_sample": True, **option} for option in options)):
        runs.drafted(target, drafter, max_new_tokens=4, **each)

    assert len(tuning._KNOWN[drafter][target]) == 3


def test_where_drafting_costs_nothing_every_step_after_the_first_ones_drafts() -> None:
    target = make_target().double()
    text = runs.plain(target, max_new_tokens=80).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), text), max_new_tokens=80)

    pair.assert_equal()
    stats = pair.stats
    assert stats.acceptance_length > 1.5
    num_plain = sum(not num_passes for _, num_passes in WARM_UP)
    assert stats.tuning["steps_by_passes"][0] == num_plain + 1  # before the last token there is no room for a draft
    assert stats.tuning["pause"] == 0


def test_where_drafting_never_pays_it_pauses(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target().double()
    text = runs.plain(target, max_new_tokens=80).sequences
    make_dear(RandomGenerator, clock, monkeypatch)

    pair = runs.both(target, InformedDrafter(RandomDrafter(), text), max_new_tokens=80)

    pair.assert_equal()
    tuning = pair.stats.tuning
    assert pair.stats.num_accepted > 0
    assert tuning["drafted_steps"] == 2 + 2 * LEAST_STEPS  # two that are cold, then at first and after the first pause
    assert tuning["steps_by_passes"][0] > PAUSE
    assert f"is tried again in {tuning['pause']} steps" in tuning["why"]


def test_all_seconds_of_a_call_are_those_of_its_clock(clock: HandClock) -> None:
    target, drafter = make_target().double(), RandomDrafter()
    runs.drafted(target, drafter)
    start = clock.now  # what the target can verify is found out in the first call

    stats = runs.drafted(target, drafter).speculation

    assert clock.now - start == stats.num_steps
    assert stats.total_seconds == stats.verify_seconds == stats.num_steps
    assert stats.prefill_seconds == stats.draft_seconds == stats.other_seconds == 0.0


def test_the_output_says_what_was_chosen_and_why() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)

    stats = runs.both(target, drafter, make_prompt(5), max_new_tokens=40, do_sample=False).stats

    tuning = stats.tuning
    assert sum(tuning["steps_by_nodes"].values()) == sum(tuning["steps_by_passes"].values()) == stats.num_steps
    assert tuning["steps_by_passes"][0] >= sum(not num_passes for _, num_passes in WARM_UP)
    assert tuning["read_seconds"]["1"] > 0
    assert "the target reads nodes: 1 in" in tuning["why"]
    assert stats.to_json()["tuning"] == tuning


def test_the_next_call_goes_on_from_what_was_learned(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target().double()
    make_dear(FalconCandidateGenerator, clock, monkeypatch)
    drafter = make_drafter(target, block_size=2)

    first, second = (
        runs.both(target, drafter, make_prompt(5), max_new_tokens=40, do_sample=False).stats.tuning for _ in range(2)
    )

    assert first["drafted_steps"] > second["drafted_steps"]  # it is not asked again soon
    assert second["steps_by_passes"][0] > len(WARM_UP)


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
def test_what_waits_too_long_is_read_and_drafts_are_those_of_a_text_read_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_eagle_target()
    target, drafter = Target(model, (-1,)), KINDS[kind](model)
    budget = DraftBudget((100,), 9)
    text, generator = Text(), drafter.candidate_generator(target, 1000, torch.Generator())
    generator.commit(text.more(9))
    generator.propose(budget)
    monkeypatch.setattr(proposing, "MOST_WAITING", 6)

    for _ in range(8):
        generator.commit(text.more(1))

    fresh = drafter.candidate_generator(target, 1000, torch.Generator())
    newest, text.num_pairs = text.num_pairs, 0
    fresh.commit(text.more(newest))
    assert generator.text.num_read == [15]  # the seventh one that waited was one too many
    assert paths(generator.propose(budget)) == paths(fresh.propose(budget))
    assert generator.text.num_read == [17]


@torch.no_grad()
def test_a_first_text_is_read_whole_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_eagle_target()
    drafter = KINDS["falcon"](model)
    text, generator = Text(), drafter.candidate_generator(Target(model, (-1,)), 1000, torch.Generator())
    monkeypatch.setattr(proposing, "MOST_WAITING", 6)

    generator.commit(text.more(40))
    generator.commit(text.more(1))
    generator.propose(DraftBudget((100,), 9))

    assert generator.text.num_read == [41]
