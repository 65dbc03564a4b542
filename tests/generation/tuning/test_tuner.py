"""The tuner in a made-up world whose costs and probabilities are known: near the best fixed setting, and never far below plain decoding."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.core.costs import CostCurve
from transformers_falcon_spec.core.tree import TreeGrowth
from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.generation.drafting import Draft, DraftBudget, Prices
from transformers_falcon_spec.generation.tuning import (
    CADENCE,
    LARGE,
    LONGEST_PAUSE,
    MANY_NODES,
    MANY_PASSES,
    MAX_PASSES,
    WARM_UP,
    CostModel,
    Tuner,
    cost_model_of,
)

pytestmark = pytest.mark.usefixtures("no_shape_checks")

WIDTH = 4
MOST_PASSES = 6
CPU = torch.device("cpu")


def _path(num_kept: int) -> AcceptedPath:
    return AcceptedPath(tuple(range(num_kept + 1)), (0,) * (num_kept + 1))


@dataclass
class World:
    """A target, a drafter of one token a pass, and a machine.

    `skill` is the probability of the drafter's best token, on average but for what falls below 0.01: under -0.5 it knows nothing.
    """

    read: Callable[[int], float]
    draft: Callable[[int], float]
    skill: float
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.draft_seconds = self.read_seconds = 0.0
        self.num_tokens = 0

    def step(self, num_nodes: int | None, num_passes: int, prices: Prices | None = None) -> tuple[Draft, int]:
        """Draft, read and keep; what was drafted, and how many of it were kept."""
        growth, frontier = (
            TreeGrowth(torch.zeros(1, 1, dtype=torch.long), torch.tensor([99])),
            torch.zeros(1, 1).long(),
        )
        marginal_gains: list[tuple[float, float]] = []
        net_gain, done = 0.0, 0
        for number in range(num_passes):
            expected_tokens = float(growth.log_node_probs.gather(1, frontier).exp().sum())
            if number and prices and not prices.pays(number, expected_tokens):
                break
            best = [min(max(self.random.gauss(self.skill, 0.2), 0.01), 0.99) for _ in range(frontier.shape[1])]
            probs = torch.tensor([[[p * (1 - p) ** rank for rank in range(WIDTH)] for p in best]])
            growth.expand(frontier, torch.arange(WIDTH).expand_as(probs), probs.log())
            frontier, done = growth.best_newest(WIDTH), number + 1
            if prices:
                before = net_gain
                num_nodes, net_gain = growth.best_tree_size(prices.nodes, prices.weights)
                marginal_gains += [(expected_tokens, net_gain - before)] if number else []
        assert num_nodes is not None
        token_ids, parents = growth.best(num_nodes)
        num_kept = self._walk(growth, num_nodes)
        self.draft_seconds += self._noisy(self.draft(done)) if done else 0.0
        self.read_seconds += self._noisy(self.read(token_ids.shape[1]))
        self.num_tokens += 1 + num_kept
        expected = growth.expected_by_depth(num_nodes, MOST_PASSES) if prices else None
        return Draft(
            token_ids, parents, num_passes=done, expected_by_depth=expected, marginal_gains=tuple(marginal_gains)
        ), num_kept

    def _walk(self, growth: TreeGrowth, num_nodes: int) -> int:
        """How deep a text goes along the tree, at each node as likely as the drafter says."""
        kept = set(growth.log_node_probs[0].sort(descending=True, stable=True).indices[:num_nodes].tolist())
        parents, probs = growth.parents[0].tolist(), growth.log_node_probs[0].exp().tolist()
        node, depth = 0, 0
        while True:
            draw, node_before = self.random.random() * probs[node], node
            for child, parent in enumerate(parents):
                if parent == node_before and child in kept:
                    draw -= probs[child]
                    if draw < 0:
                        node, depth = child, depth + 1
                        break
            if node == node_before:
                return depth

    def _noisy(self, seconds: float) -> float:
        return seconds * self.random.uniform(1 - self.noise, 1 + self.noise)

    @property
    def rate(self) -> float:
        """Tokens a second so far."""
        return self.num_tokens / (self.draft_seconds + self.read_seconds)


def rate_of_fixed(world: World, num_nodes: int, num_passes: int, num_steps: int) -> float:
    for _ in range(num_steps):
        world.step(num_nodes, num_passes)
    return world.rate


def run_tuned(world: World, num_steps: int, known: CostModel | None = None) -> Tuner:
    tuner = Tuner(known or CostModel(), CPU)
    for _ in range(num_steps):
        budget = tuner.limited(DraftBudget((99,), 256))
        if budget is None:
            draft, num_kept = world.step(1, 0)
        else:
            num_passes = min(budget.num_passes or MOST_PASSES, MOST_PASSES)
            num_nodes = None if budget.prices else budget.num_nodes
            draft, num_kept = world.step(num_nodes, num_passes, budget.prices)
        tuner.learn(draft, [_path(num_kept)], world.draft_seconds, world.read_seconds)
    return tuner


def cpu(skill: float, seed: int = 0) -> World:
    """Nodes cost from the first one on, and a pass costs a fifth of a plain step."""
    return World(lambda n: 8e-3 + 0.3e-3 * n, lambda p: 1.6e-3 * p, skill, seed=seed)


def gpu(skill: float, seed: int = 0) -> World:
    """Nodes cost nothing until the device is full, and a pass costs a tenth of a plain step."""
    return World(lambda n: 20e-3 + 0.2e-3 * max(n - 48, 0), lambda p: 2e-3 * p, skill, seed=seed)


@pytest.mark.parametrize(
    ("make", "skill"),
    [
        (cpu, 0.4),
        (gpu, 0.75),
        *(pytest.param(*case, marks=pytest.mark.benchmarks) for case in [(gpu, 0.4), (cpu, 0.75)]),
    ],
)
def test_it_comes_close_to_the_best_fixed_setting(make: Callable[..., World], skill: float) -> None:
    settings = [(nodes, passes) for nodes in (4, 8, 16, 32) for passes in (1, 2, 4)]
    best = max(rate_of_fixed(make(skill), *setting, num_steps=100) for setting in settings)
    known, world = CostModel(), make(skill, seed=1)
    run_tuned(make(skill), 100, known)

    run_tuned(world, 300, known)

    assert world.rate > 0.95 * best


@pytest.mark.parametrize(
    "skill", [0.0, pytest.param(-1.0, marks=pytest.mark.benchmarks)]
)  # hardly useful, and useless
def test_a_useless_drafter_costs_next_to_nothing_once_it_is_known(skill: float) -> None:
    known, world = CostModel(), cpu(skill)
    run_tuned(cpu(skill), 300, known)

    tuner = run_tuned(world, 2000, known)

    assert world.rate > 0.98 / world.read(1)
    assert "tried again in" in known.why()
    assert known.pause == LONGEST_PAUSE
    assert tuner.num_passes[0] > 0.95 * 2000


def _nodes_of_batch(read: Callable[[int], float], num_rows: int, num_steps: int) -> list[int]:
    """Nodes a row of each step of a tuned batch, 0 if it is plain; drafts are chains, nine of ten tokens are right."""
    growth = TreeGrowth(torch.zeros(num_rows, 1, dtype=torch.long), torch.full((num_rows,), 99))
    one_child = torch.zeros(num_rows, 1, 1, dtype=torch.long)
    for _ in range(5):
        growth.expand(growth.best_newest(1), one_child, torch.full_like(one_child, 0.9, dtype=torch.float).log())

    def path(num_nodes: int) -> AcceptedPath:
        num_kept = 0
        while num_kept < num_nodes - 1 and draw.random() < 0.9:
            num_kept += 1
        return _path(num_kept)

    tuner, draw = Tuner(CostModel(), CPU), random.Random(0)
    draft_seconds = read_seconds = 0.0
    sizes = []
    for _ in range(num_steps):
        budget = tuner.limited(DraftBudget((99,) * num_rows, 16))
        prices = None if budget is None else budget.prices
        num_nodes, expected = 1, None
        if prices is not None:
            num_nodes, _ = growth.best_tree_size(prices.nodes, prices.weights)
            expected = growth.expected_by_depth(num_nodes, 5)
        elif budget is not None:
            num_nodes = min(budget.num_nodes, 6)

        num_passes = int(budget is not None)
        draft_seconds += 1e-3 * num_passes
        read_seconds += read(num_nodes)
        draft = Draft(*growth.best(num_nodes), num_passes=num_passes, expected_by_depth=expected)
        tuner.learn(draft, [path(num_nodes) for _ in range(num_rows)], draft_seconds, read_seconds)
        sizes.append(num_nodes * num_passes)

    return sizes


def test_a_batch_that_fills_the_machine_is_written_plainly_however_good_its_drafts() -> None:
    full = _nodes_of_batch(lambda num_nodes: 10e-3 * num_nodes, 8, 400)
    idle = _nodes_of_batch(lambda num_nodes: 10e-3 + 1e-5 * num_nodes, 8, 400)

    assert full.count(0) > 0.9 * 400
    assert idle.count(6) > 0.9 * 400


def test_drafting_comes_back_when_it_pays_again() -> None:
    known = CostModel()
    run_tuned(cpu(0.0), 400, known)
    assert known.num_left > 0

    tuner = run_tuned(cpu(0.8), 2 * LONGEST_PAUSE, known)

    assert known.num_left == 0
    assert tuner.num_passes[0] < 1.5 * LONGEST_PAUSE
    assert known.advantage.value > 0


def test_probabilities_that_promise_too_much_are_believed_less() -> None:
    world, known = cpu(0.8), CostModel()
    walk = world._walk
    world._walk = lambda *args: min(walk(*args), 1)  # type: ignore[method-assign]  # nothing below depth 1 is ever kept

    run_tuned(world, 100, known)

    assert known.prices is not None
    root, first, second, *_ = known.prices.weights.tolist()
    assert root == 1.0
    assert 0.8 < first < 1.25
    assert second == 0.25


def test_a_pass_that_stopped_paying_is_tried_again() -> None:
    known, token_ids = CostModel(), torch.zeros(1, 2, dtype=torch.long)
    draft = Draft(token_ids, token_ids - 1, expected_by_depth=torch.tensor([1.0, 0.5]))
    for _ in range(20):
        known.learn_node_probs(replace(draft, num_passes=2, marginal_gains=((0.8, 0.0),)), [1])
    assert known.pass_yields[1].value < 0.1

    for _ in range(120):
        known.learn_node_probs(draft, [1])

    assert known.pass_yields[1].value > 0.5


def test_a_pass_that_seems_too_dear_is_tried_again() -> None:
    known, true_cost = CostModel(), gpu(0.75).draft
    run_tuned(gpu(0.75), 50, known)
    usual, known.draft = known.num_passes.value, CostCurve()
    for _ in range(20):
        known.draft.learn(1, true_cost(1))
        known.draft.learn(2, 20 * true_cost(2))

    known.prices, known.num_since_plain = None, 0
    tuner = run_tuned(gpu(0.75), MANY_PASSES - 2, known)
    assert max(tuner.num_passes) < 0.5 * usual
    run_tuned(gpu(0.75), 600, known)

    assert known.num_passes.value > 0.5 * usual


def test_a_drafter_that_usually_takes_many_passes_takes_one_more_now_and_then() -> None:
    known = CostModel(num_since_plain=MANY_PASSES, prices=CostModel().new_prices(8))
    for _ in range(20):
        known.num_passes.learn(MAX_PASSES + 3)

    prices = known.prices_now()

    taken = [number for number in range(1, 3 * MAX_PASSES) if prices.pays(number, expected_tokens=1.0)]
    assert taken == list(range(1, MAX_PASSES + 4))  # beside the first, which is not asked about


def test_now_and_then_a_step_reads_many_nodes() -> None:
    known = CostModel()
    run_tuned(cpu(0.2), 50, known)
    known.num_left, known.num_since_plain, usual = 0, MANY_NODES - 1, known.num_nodes.value

    tuner = run_tuned(cpu(0.2), 1, known)

    assert usual < LARGE / 2
    assert [*tuner.num_nodes] == [LARGE]


def test_prices_are_those_of_the_nodes_that_each_step_may_read() -> None:
    """Prices serve several steps: more of them than nodes would let a draft be larger than its budget, fewer of them fail."""
    tuner = Tuner(CostModel(num_steps=len(WARM_UP) + CADENCE + 1), None)

    budgets = [tuner.limited(DraftBudget((99,), num_nodes)) for num_nodes in (2, 64, 8)]

    assert [len(budget.prices.nodes) for budget in budgets] == [2, 64, 8]


def test_the_first_steps_learn_what_sizes_cost() -> None:
    tuner, taken = Tuner(CostModel(), CPU), []

    for _ in WARM_UP:
        budget = tuner.limited(DraftBudget((99,), 256))
        taken.append((1, 0) if budget is None else (budget.num_nodes, budget.num_passes))
        num_nodes, num_passes = taken[-1]
        token_ids = torch.zeros(1, num_nodes, dtype=torch.long)
        tuner.learn(
            Draft(token_ids, token_ids - 1, num_passes=num_passes), [_path(0)], 0.1 * len(taken), 1.0 * len(taken)
        )

    assert tuple(taken) == WARM_UP
    assert tuner.limited(DraftBudget((99,), 256)).prices is not None


def test_a_read_costs_what_its_replays_take_not_what_its_capture_took() -> None:
    tuner, token_ids = Tuner(CostModel(), CPU), torch.zeros(1, 8, dtype=torch.long)

    tuner.learn(Draft(token_ids, token_ids - 1), [_path(2)], 0.0, 0.4, 0.01)
    tuner.learn(Draft(token_ids, token_ids - 1), [_path(2)], 0.0, 0.4 + 0.012)

    assert tuner.cost_model.read(8) == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(10))
def test_a_smaller_grown_tree_is_expected_to_keep_what_it_would_have_kept(seed: int) -> None:
    draw, growth, newest = random.Random(seed), TreeGrowth(torch.zeros(1, 1).long(), torch.tensor([99])), [[0]]
    for _ in range(4):
        frontier = torch.tensor(newest)
        probs = torch.tensor([[[0.9 * draw.random() / 2**rank for rank in range(WIDTH)] for _ in frontier[0]]])
        growth.expand(frontier, torch.arange(WIDTH).expand_as(probs), probs.log())
        newest = growth.best_newest(WIDTH).tolist()
    paths = {size: _token_paths(*growth.best(size)) for size in (8, 16, 32)}

    for node, path in enumerate(paths[32]):
        known = CostModel()
        known.learn_fixed(32, [[paths[32].index(path[:length]) for length in range(len(path) + 1)]])

        for size in (8, 16):
            kept = sum(path[:length] in paths[size] for length in range(1, len(path) + 1))
            assert known.kept_by_size[size].value == kept, (node, path)


def _token_paths(token_ids: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    """The tokens on the way to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(token_ids[0].tolist(), parents[0].tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths


def test_without_knowledge_the_budget_stays_as_it_is() -> None:
    tuner, budget = Tuner(None, CPU), DraftBudget((3,), 7)

    assert tuner.limited(budget) is budget
    assert tuner.to_json() == {}


class Model(torch.nn.Linear):
    """Something with options that can be known."""

    generation_config = SpeculationConfig()


def test_models_are_remembered_together_as_long_as_they_live() -> None:
    drafter, target, other = Model(1, 1), Model(1, 1), Model(1, 1)

    known = cost_model_of(drafter, target, "alone")

    assert cost_model_of(drafter, target, "alone") is known
    assert cost_model_of(drafter, target, "in a batch") is not known
    assert cost_model_of(drafter, other, "alone") is not known
    assert cost_model_of(other, target, "alone") is not known
    drafter.generation_config = SpeculationConfig(num_tree_nodes=9)
    assert cost_model_of(drafter, target, "alone") is not known


def test_a_proposal_that_read_much_text_first_teaches_nothing_of_passes() -> None:
    tuner, token_ids = Tuner(CostModel(num_steps=len(WARM_UP)), CPU), torch.zeros(1, 2, dtype=torch.long)
    drafted = Draft(token_ids, token_ids - 1, num_passes=1)

    for draft_seconds, read_seconds in ((5.0, 1.0), (5.2, 2.0)):  # the first one reads the prompt
        assert tuner.limited(DraftBudget((99,), 256)) is not None
        tuner.learn(drafted, [_path(0)], draft_seconds, read_seconds)

    assert tuner.cost_model.draft(1) == pytest.approx(0.2)


def test_a_draft_that_came_to_nothing_costs_its_seconds() -> None:
    known = CostModel(num_steps=len(WARM_UP))
    tuner, root = Tuner(known, CPU), torch.zeros(1, 1, dtype=torch.long)
    known.read.learn(1, 1.0)

    for number in range(1, 4):
        assert tuner.limited(DraftBudget((99,), 256)) is not None
        tuner.learn(Draft(root, root - 1, num_passes=0), [_path(0)], 0.5 * number, 1.0 * number)

    assert known.draft(1) == pytest.approx(0.5)
    assert known.advantage.value < -0.3


def _kept(num: int, first: int) -> list[AcceptedPath]:
    """A path that goes over nodes `first`, `first + 1` and so on."""
    return [AcceptedPath((0, *range(first, first + num)), (0,) * (num + 1))]


def _run_fixed(
    known: CostModel, num_steps: int, seconds: Callable[[int], float], kept: list[AcceptedPath]
) -> list[int]:
    """Steps of drafts in fixed shapes, of 64 nodes where nothing limits them; the nodes of each."""
    tuner, sizes, spent = Tuner(known, CPU), [], 0.0
    tuner.has_fixed_drafts = True
    for _ in range(num_steps):
        budget = tuner.limited(DraftBudget((9,), 64))
        size = 1 if budget is None else budget.num_nodes
        sizes.append(size)
        spent += seconds(size)
        nodes = [[node for node in path.path if node < size] for path in kept]
        paths = [AcceptedPath(tuple(each), (0,) * len(each)) for each in nodes]
        token_ids = torch.zeros(1, size, dtype=torch.long)
        tuner.learn(Draft(token_ids, token_ids - 1, num_passes=int(size > 1)), paths, 0.0, spent)
    return sizes


def test_fixed_drafts_that_pay_stay_whole() -> None:
    sizes = _run_fixed(CostModel(), 300, lambda size: 1.0 + size / 128, _kept(3, 1))

    assert sizes[:4] == [1, 64, 1, 64]
    assert sizes.count(64) >= 290


def test_fixed_drafts_shrink_where_smaller_ones_pay() -> None:
    sizes = _run_fixed(CostModel(), 300, lambda size: 1.0 + size / 16, _kept(2, 1))

    assert set(sizes) == {1, 8, 64}
    assert sizes.count(64) < 10
    assert sizes.count(8) > 250
    changes = sum(one != other for one, other in pairwise(size for size in sizes if size > 1))
    assert changes == 1  # it does not oscillate


def test_fixed_drafts_pause_where_none_pays() -> None:
    sizes = _run_fixed(CostModel(), 1024, lambda size: 1.0 if size == 1 else 1.3, _kept(0, 1))

    seconds = sum(1.0 if size == 1 else 1.3 for size in sizes)
    assert len(sizes) / seconds > 0.97
