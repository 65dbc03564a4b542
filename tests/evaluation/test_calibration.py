"""Fitting temperatures: known ones are found again, and whole softmaxes agree."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.calibration import SeenLists
from tests import runs
from tests.drafters.eagle.kinds import make_eagle
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.calibration import (
    TEMPERATURES,
    UNCALIBRATED,
    DrafterObserver,
    Observations,
    ObservedText,
    fit,
    nearest_index,
    num_seen_positions,
)

VOCAB = 30
TRUE = {"greedy": [0.6, 1.6], "sampled": [0.8, 0.0]}
HEATS = {"greedy": None, "warm": 0.5, "hot": 1.0}
ONE_STEP = math.log(TEMPERATURES[1] / TEMPERATURES[0])

Lists = tuple[list[int], torch.Tensor, list[int]]  # depths, scores and choices


def true_temperature(position: int, heat: float | None) -> float:
    return math.sqrt(TRUE["greedy"][position] ** 2 + ((heat or 0.0) * TRUE["sampled"][position]) ** 2)


def made_lists(num: int, heat: float | None, seed: int) -> Lists:
    """Random scores, and choices drawn with the probabilities that the true temperatures give, in blocks of two."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(num, VOCAB, generator=generator)
    depths = [1 + row % 4 for row in range(num)]
    spreads = torch.tensor([true_temperature((depth - 1) % 2, heat) for depth in depths])
    chosen = torch.multinomial((scores / spreads[:, None]).softmax(-1), 1, generator=generator)[:, 0]
    return depths, scores, chosen.tolist()


def made_texts(num_prompts: int, num: int) -> tuple[list[ObservedText], dict[str, list[Lists]]]:
    texts, raw = [], {}
    for number in range(num_prompts):
        for shift, (name, heat) in enumerate(HEATS.items()):
            lists = made_lists(num, heat, 10 * number + shift)
            raw.setdefault(name, []).append(lists)
            texts.append(ObservedText(f"prompt {number:02d}", name, heat, Observations.of(*lists, heat or 1.0)))
    return texts, raw


@pytest.fixture(scope="module")
def made() -> tuple[list[ObservedText], dict[str, list[Lists]]]:
    return made_texts(10, 400)


def test_known_temperatures_are_found_again(made: Any) -> None:
    found = fit(made[0], block_size=2)

    for position in range(2):
        assert abs(math.log(found["greedy"][position] / TRUE["greedy"][position])) < 1.5 * ONE_STEP
    for heat in (0.5, 1.0):
        for position in range(2):
            spread = math.hypot(found["greedy"][position], heat * found["sampled"][position])
            assert abs(math.log(spread / true_temperature(position, heat))) < 1.5 * ONE_STEP


def naive_loss(lists: list[Lists], position: int, spread: float) -> float:
    """Minus the log-probability of all choices of a position, from whole softmaxes."""
    total = 0.0
    for depths, scores, chosen in lists:
        for depth, row, token in zip(depths, scores.double(), chosen, strict=True):
            if (depth - 1) % 2 == position:
                total -= float((row / spread).log_softmax(-1)[token])
    return total


def test_the_fit_is_the_best_of_a_search_over_whole_softmaxes() -> None:
    texts, raw = made_texts(3, 60)

    found = fit(texts, block_size=2)

    for position in range(2):
        losses = [naive_loss(raw["greedy"], position, temperature) for temperature in TEMPERATURES]
        assert found["greedy"][position] == pytest.approx(TEMPERATURES[losses.index(min(losses))], rel=1e-3)
        spreads = [0.0, *TEMPERATURES[::4], found["sampled"][position]]
        sums = []
        for spread in spreads:
            used = {name: math.hypot(found["greedy"][position], HEATS[name] * spread) for name in ("warm", "hot")}
            nearest = {name: TEMPERATURES[nearest_index(value)] for name, value in used.items()}
            sums.append(sum(naive_loss(raw[name], position, nearest[name]) for name in nearest))
        assert sums[-1] <= min(sums) + 1e-3


def test_too_few_tokens_at_the_first_position_are_refused(made: Any) -> None:
    with pytest.raises(OptionError, match=r"at least 20 tokens, greedy and sampled, but it saw 0 and 4000"):
        fit([text for text in made[0] if text.decoding != "greedy"], 2)


def test_positions_that_too_few_texts_reach_take_the_temperatures_of_the_last_one_that_enough_do(made: Any) -> None:
    deepest = max(int(text.seen.depths.max()) for text in made[0])

    found = fit(made[0], block_size=deepest + 2)

    assert num_seen_positions(made[0], deepest + 2) == deepest
    for name, temperatures in fit(made[0], deepest).items():
        assert found[name] == [*temperatures, temperatures[-1], temperatures[-1]]


def test_what_was_seen_survives_json_and_a_token_that_cannot_be_drafted() -> None:
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    seen = Observations.of([1, 2, 3], scores, [4, -1, int(scores[2].argmax())], 0.7)

    again = Observations.from_json(seen.to_json())

    assert again.depths.equal(seen.depths)
    torch.testing.assert_close(again.losses, seen.losses, atol=1e-4, rtol=0)
    assert again.losses[1].eq(0).all()
    expected = (scores / 0.7).softmax(-1)
    torch.testing.assert_close(again.losses[0, UNCALIBRATED], -expected[0, 4].log(), atol=1e-4, rtol=0)


def falcon(target: Any, **config: Any) -> Any:
    drafter = make_drafter(target, block_size=2, **config)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, tree_depth=2, num_tree_nodes=73, tree_top_k=8)
    return drafter


def falcon_with_a_transition(target: Any) -> Any:
    drafter = falcon(target, transition_rank=8)
    with torch.no_grad():
        drafter.transition.after.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
    return drafter


def eagle(target: Any) -> Any:
    return make_eagle(target, "eagle-1", tree_depth=2, num_tree_nodes=73, tree_top_k=8)


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("make", [falcon, falcon_with_a_transition, eagle])
def test_the_observer_sees_what_the_text_became(make: Callable[[Any], Any], temperature: float | None) -> None:
    target = make_target(seed=7).double()
    observer = DrafterObserver(make(target))
    options = {} if temperature is None else {"do_sample": True, "temperature": temperature, "top_k": 0}

    pairs = [runs.both(target, observer.drafter, make_prompt(seed=seed), **options) for seed in range(3)]
    seen = observer.take(temperature, SeenLists)

    for pair in pairs:
        pair.assert_equal(is_kept=False)
    assert seen is not None
    assert observer.take(temperature) is None
    histogram: dict[int, int] = {}
    for pair in pairs:
        for num, steps in pair.stats.acceptance_histogram.items():
            histogram[num] = histogram.get(num, 0) + steps
    is_first, is_second = seen.depths == 1, seen.depths == 2
    # every node of a list is in the tree, so that the accepted nodes of a tree are those of the lists; at its end a
    # text has no room for the second node, whose list a block has all the same
    num_first, num_second = (int(seen.is_kept[at].any(-1).sum()) for at in (is_first, is_second))
    slack = len(pairs) * (observer.drafter.block_size > 1)
    assert num_first == sum(steps for num, steps in histogram.items() if num >= 1)
    assert 0 <= num_second - sum(steps for num, steps in histogram.items() if num >= 2) <= slack
    assert num_second <= int(is_second.sum()) <= num_first
    assert sum(histogram.values()) > 15


def test_an_observed_drafter_drafts_as_if_it_were_not_calibrated() -> None:
    target = make_target(seed=7).double()
    stored = {"greedy": [9.0, 0.1], "sampled": [9.0, 0.1]}
    found = []
    for temperatures in (None, stored):
        drafter = falcon(target)
        drafter.config.confidence_temperatures = temperatures
        observer = DrafterObserver(drafter)
        runs.drafted(target, observer.drafter)
        found.append(observer.take(None))
        assert drafter.config.confidence_temperatures == temperatures

    assert found[0].losses.equal(found[1].losses)


def test_a_drafter_without_growing_trees_is_refused() -> None:
    target = make_target()
    static = make_drafter(target, block_size=2)

    for drafter in (static, LookaheadDrafter.from_target(target)):
        with pytest.raises(OptionError, match="Calibration needs a drafter that grows trees"):
            DrafterObserver(drafter)
