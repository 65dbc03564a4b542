"""Chooses how much is drafted: the costs and tokens of past steps become prices of nodes and passes, in tokens.

A step that takes p passes of the drafter and reads n nodes costs draft(p) + read(n) seconds and brings one token and
what it keeps of the draft. Most tokens a second come from steps that each maximise tokens - rate * seconds, `rate`
being the tokens a second that come of it (W. Dinkelbach, On nonlinear fractional programming, 1967). So a node pays
while its probability is above rate * read'(n), a pass while it is expected to add more than rate * draft'(p), and
drafting while drafted steps beat plain ones. Token matching takes the target's tokens whatever was drafted, so that
none of this changes the text.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..core.costs import MEMORY, CostCurve
from ..core.tree import MAX_NODES
from ..core.verification import AcceptedPath
from .drafting import Draft, DraftBudget, Prices
from .verifier import Verifier

# Nodes and passes of the first steps of a pair of models, to learn what they cost.
LARGE = 16
WARM_UP = ((1, 0), (4, 1), (LARGE, 2), (1, 0), (8, 1), (LARGE, 2))
NUM_COLD = 3  # of the first steps, whose seconds say nothing of later ones
FIXED_WARM_UP = (False, True, False, True)  # the same of drafts in fixed shapes, each captured once
FIXED_SIZES = (8, 16, 32, 64, 128, 256)  # nodes of smaller trees, of which each costs a capture
# Of so many drafted steps one gives way to a plain one, one reads twice the usual nodes, one takes a pass more than
# usual, whatever they seem to cost: else a price that is wrong might never be paid again.
REFRESH, MANY_NODES, MANY_PASSES = 96, 32, 64
TRUSTED = 2  # times the largest tree read so far: what more nodes cost is not known
LEAST_STEPS = 6  # drafted steps before drafting may be given up
TRIAL_AGAIN = 32  # drafted steps in which it must show that it pays, once it was given up
PAUSE, LONGEST_PAUSE = 16, 1024  # plain steps before drafting is tried again; four times as many each time it fails
MAX_DEPTH = 16  # depths whose acceptance is learned
MAX_PASSES = 8  # passes whose yields are learned; later ones are like the last
MAX_WEIGHT = 4.0
NODES_PER_WIDTH, MAX_WIDTH = 4, 16  # of trees of so many nodes that many nodes of a depth are considered
EPS = 1e-6
CADENCE = 16  # steps between two looks at the prices
UNREAD = 8  # after so many plain steps the drafter reads much text first, and its seconds are not typical


@dataclass
class Mean:
    """A mean that forgets, towards `prior` where there is one, and how sure it is."""

    prior: float | None = None
    total: float = 0.0
    num: int = 0
    weight: float = 0.0
    squares: float = 0.0

    def learn(self, value: float) -> None:
        """Add one value."""
        self.fade()
        self.weight += 1
        self.total += value
        self.squares += value**2
        self.num += 1

    def fade(self) -> None:
        """Let older values count less."""
        self.weight *= MEMORY
        self.total *= MEMORY
        self.squares *= MEMORY

    @property
    def value(self) -> float:
        """The mean; a prior weighs as much as one new value, without one it is 0 while nothing is known."""
        if self.prior is not None:
            return (self.total + self.prior) / (self.weight + 1)
        return self.total / self.weight if self.weight else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        variance = max(self.squares / self.weight - self.value**2, 0.0) if self.weight else 0.0
        return float((variance / max(self.weight, 1.0)) ** 0.5)


@dataclass
class CostModel:
    """The measurements of a target and a drafter on one machine and under like options; they live as the models do."""

    read: CostCurve = field(default_factory=CostCurve)  # seconds of the target's forward by nodes
    draft: CostCurve = field(default_factory=CostCurve)  # seconds of a proposal by passes, none counted as one
    tokens: Mean = field(default_factory=Mean)  # of a step
    seconds: Mean = field(default_factory=Mean)
    num_nodes: Mean = field(default_factory=Mean)  # of drafted steps
    num_passes: Mean = field(default_factory=Mean)
    advantage: Mean = field(default_factory=Mean)  # tokens by which a drafted step beats plain ones in the same time
    # The net tokens of each pass, as in `Prices`.
    pass_yields: list[Mean] = field(default_factory=lambda: [Mean(prior=1.0) for _ in range(MAX_PASSES)])
    expected: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(MAX_DEPTH)])  # tokens kept by depth
    kept: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(MAX_DEPTH)])
    num_steps: int = 0
    num_since_plain: int = 0
    pause: int = PAUSE  # the next one's length
    num_left: int = 0  # plain steps until drafting is tried again
    prices: Prices | None = None
    # Where drafts have fixed shapes: the limit of the next ones, None for whole trees, and by size what was kept.
    most_nodes: int | None = None
    kept_by_size: dict[int, Mean] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens a second of the newest steps."""
        return self.tokens.value / max(self.seconds.value, EPS)

    def learn_step(self, num_nodes: int, num_passes: int | None, num_kept: list[int]) -> None:
        """Add the tokens and the cost of a step; `num_passes` is None if no draft was asked for."""
        seconds = self.read(num_nodes) + (0.0 if num_passes is None else self.draft(max(num_passes, 1)))
        self.num_steps += 1
        if self.num_steps <= NUM_COLD:
            return

        self.tokens.learn(len(num_kept) + sum(num_kept))
        self.seconds.learn(seconds)
        if num_passes is None:
            return

        self.num_nodes.learn(num_nodes)
        self.num_passes.learn(num_passes)
        self.advantage.learn(1 + sum(num_kept) / len(num_kept) - seconds / max(self.read(1), EPS))
        is_loss = self.advantage.num >= LEAST_STEPS and self.advantage.value + self.advantage.error < 0
        is_gain = self.advantage.value > self.advantage.error
        is_doubtful = self.pause > PAUSE and self.advantage.num >= TRIAL_AGAIN and not is_gain
        if (is_loss or is_doubtful) and not self._shrink(num_nodes):
            self.num_left, self.pause = self.pause, min(4 * self.pause, LONGEST_PAUSE)
            self.advantage, self.most_nodes = Mean(), None
        elif self.advantage.num >= REFRESH and is_gain:
            self.pause = PAUSE

    def next_fixed_size(self, num_nodes: int) -> int:
        """The limit of the next draft, which has one of a few fixed shapes; 1 for a plain step."""
        if self.num_steps < len(FIXED_WARM_UP):
            return num_nodes if FIXED_WARM_UP[self.num_steps] else 1
        if self.is_next_plain():
            return 1
        return num_nodes if self.most_nodes is None else min(num_nodes, self.most_nodes)

    def learn_fixed(self, num_nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Learn what smaller trees, the first nodes of this one, would have kept of these paths."""
        for size in (each for each in FIXED_SIZES if each < num_nodes):
            kept = sum(node < size for path in paths for node in path) - len(paths)
            self.kept_by_size.setdefault(size, Mean()).learn(kept / len(paths))

    def _shrink(self, num_nodes: int) -> bool:
        """Go over to the smaller trees that should bring most, if any should pay."""
        plain, draft = max(self.read(1), EPS), self.draft(1)
        sizes = [size for size in FIXED_SIZES if size < num_nodes and size in self.kept_by_size]
        gains = {size: 1 + self.kept_by_size[size].value - (self.read(size) + draft) / plain for size in sizes}
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 0:
            return False

        self.most_nodes, self.advantage = best, Mean()
        return True

    def learn_node_probs(self, draft: Draft, num_kept: list[int]) -> None:
        """Compare the tokens that the drafter expected to be accepted with those that were."""
        assert draft.expected_by_depth is not None  # the caller asked
        for mean in self.pass_yields[len(draft.marginal_gains) + 1 :]:
            mean.fade()  # so that a pass that stopped paying is tried again

        for mean, (expected, gained) in zip(self.pass_yields[1:], draft.marginal_gains, strict=False):
            mean.learn(gained / max(expected, EPS))

        for depth, expected in enumerate(draft.expected_by_depth.tolist()[1 : MAX_DEPTH + 1], start=1):
            self.expected[depth - 1].learn(expected)
            self.kept[depth - 1].learn(sum(kept >= depth for kept in num_kept))

    def is_next_plain(self) -> bool:
        """Whether the next step is plain: drafting pauses, or the cost of plain steps is measured again."""
        if self.num_left:
            self.num_left -= 1
            return True
        self.num_since_plain = (self.num_since_plain + 1) % REFRESH
        return self.num_since_plain == 0

    def new_prices(self, num_nodes: int) -> Prices:
        """Prices at the rate of the newest steps; a node far beyond what was read costs a token and cannot pay."""
        rate = self.rate
        plain = self.read(1)
        known = round(TRUSTED * self.read.largest)
        draft = [self.draft(num) for num in range(1, MAX_PASSES + 1)]
        pairs = zip(self.kept, self.expected, strict=True)
        weights = [(kept.total + 1) / (expected.total + 1) for kept, expected in pairs]
        return Prices(
            nodes=torch.tensor(
                [rate * (self.read(min(num, known)) - plain) + max(num - known, 0) for num in range(1, num_nodes + 1)],
                dtype=torch.float,
            ),
            passes=[0.0, *(rate * (more - less) for less, more in pairwise(draft))],
            pass_yields=[mean.value for mean in self.pass_yields],
            weights=torch.tensor([1.0, *weights], dtype=torch.float).clamp(1 / MAX_WEIGHT, MAX_WEIGHT),
            width=min(round(self.num_nodes.value / NODES_PER_WIDTH), MAX_WIDTH),
        )

    def prices_now(self, num_nodes: int = MAX_NODES) -> Prices:
        """The prices of a step that reads at most so many nodes.

        Now and then nodes or passes are free, so that more of them are measured.
        """
        assert self.prices is not None  # `new_prices` comes first
        prices = replace(self.prices, nodes=self.prices.nodes[:num_nodes])
        if self.num_since_plain == MANY_NODES:
            num_free = max(round(2 * self.num_nodes.value), LARGE)
            is_free = torch.arange(len(prices.nodes)) < num_free
            return replace(prices, nodes=prices.nodes.masked_fill(is_free, 0.0))

        if self.num_since_plain == MANY_PASSES:
            num_free = round(self.num_passes.value) + 1
            return replace(prices, passes=[-inf] * num_free + [inf])

        return prices

    def why(self) -> str:
        """One sentence that says why so much or so little is drafted."""
        if self.num_steps < len(WARM_UP):
            return "Still learning what steps cost."

        costs = f"the target reads nodes: {_by_size(self.read)}; drafts come of passes: {_by_size(self.draft)}"
        if self.num_left:
            return f"Drafting brought less than it cost and is tried again in {self.num_left} steps: {costs}."

        tokens = f"{self.advantage.value:+.2f} tokens"
        return f"A drafted step brings {tokens} more than plain steps in the same time: {costs}."


def _by_size(curve: CostCurve) -> str:
    return ", ".join(f"{size} in {1e3 * seconds:.1f} ms" for size, seconds in curve.to_json().items())


_KNOWN: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, CostModel]]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def cost_model_of(drafter: Any, target: Any, key: Any) -> CostModel:
    """The cost model of a drafter, shared by all calls with the same models, options and key."""
    options = repr(drafter.generation_config.own_options())
    with _LOCK:
        by_target = _KNOWN.setdefault(drafter, WeakKeyDictionary())
        return by_target.setdefault(target, {}).setdefault((key, options), CostModel())


class Tuner:
    """Chooses the budget of every step of one call by a cost model; without one nothing is tuned."""

    def __init__(self, cost_model: CostModel | None, device: torch.device | None) -> None:
        self.cost_model = cost_model
        is_waited_for = cost_model is not None and device is not None and device.type != "cpu"
        self.waits_for = device if is_waited_for else None  # the device whose time is taken by the host's clock
        # steps of this call, by what they took
        self.num_nodes = Counter[int]()
        self.num_passes = Counter[int]()
        self.num_asked = 0
        self._is_asked = False  # whether the newest step asked for a draft
        self._num_unread = UNREAD  # steps since the last draft
        self._seconds = (0.0, 0.0)  # of drafting and reading, before this step
        self.has_fixed_drafts = False  # drafts have a few fixed shapes, and none is priced node by node

    def limited(self, budget: DraftBudget) -> DraftBudget | None:
        """The budget of the next step within `budget`; None for a plain one."""
        known = self.cost_model
        if known is None:
            return budget

        limits = dict[str, Any]()
        if self.has_fixed_drafts:
            limits["num_nodes"] = known.next_fixed_size(budget.num_nodes)
            self._is_asked = limits["num_nodes"] > 1
        elif known.num_steps < len(WARM_UP):
            num_nodes, num_passes = WARM_UP[known.num_steps]
            limits |= {"num_nodes": min(num_nodes, budget.num_nodes), "num_passes": num_passes}
            self._is_asked = num_passes > 0
        else:
            self._is_asked = not known.is_next_plain()
            is_early = known.num_steps < len(WARM_UP) + CADENCE  # every step still teaches much
            if self._is_asked and (known.prices is None or is_early or known.num_steps % CADENCE == 0):
                # they serve later steps, too, which may read more nodes than this one
                known.prices = known.new_prices(MAX_NODES)
            limits["prices"] = known.prices_now(budget.num_nodes) if self._is_asked else None

        return replace(budget, **limits) if self._is_asked else None

    def learn(
        self,
        draft: Draft,
        paths: Sequence[AcceptedPath],
        draft_seconds: float,
        read_seconds: float,
        read_price: float | None = None,
    ) -> None:
        """Add a step: what each row accepted that took one, and all seconds so far.

        `read_price` are those of reading its tree from now on, where the step itself took longer to prepare that.
        """
        before, self._seconds = self._seconds, (draft_seconds, read_seconds)
        is_asked, self._is_asked = self._is_asked and not draft.is_text_alone, False
        known = self.cost_model
        if known is None or not paths:
            return

        num_kept = [path.num_accepted for path in paths]
        num_nodes, num_passes = draft.token_ids.shape[1], draft.num_passes
        self.num_nodes[num_nodes] += 1
        self.num_passes[num_passes] += 1
        known.read.learn(num_nodes, read_seconds - before[1] if read_price is None else read_price)
        self._num_unread += 1
        if is_asked:
            self.num_asked += 1
            if self._num_unread <= UNREAD:  # else it read much text at once
                known.draft.learn(max(num_passes, 1), draft_seconds - before[0])
            self._num_unread = 0

        known.learn_step(num_nodes, num_passes if is_asked else None, num_kept)
        if self.has_fixed_drafts and is_asked:
            known.learn_fixed(num_nodes, [path.path for path in paths])

        if draft.expected_by_depth is not None:
            known.learn_node_probs(draft, num_kept)

    def to_json(self) -> dict[str, Any]:
        """What was chosen in this call, and what is known by now of the drafter."""
        known = self.cost_model
        if known is None:
            return {}

        return {
            "drafted_steps": self.num_asked,
            "tokens_per_second": known.rate,
            "steps_by_nodes": dict(sorted(self.num_nodes.items())),
            "steps_by_passes": dict(sorted(self.num_passes.items())),
            "read_seconds": known.read.to_json(),
            "draft_seconds": known.draft.to_json(),
            "num_outliers": known.read.num_outliers + known.draft.num_outliers,
            "advantage": known.advantage.value,
            "pause": known.num_left,
            "why": known.why(),
        }


TUNER: ContextVar[Callable[..., Tuner]] = ContextVar("tuner", default=Tuner)  # makes the tuner of each call


def known_costs(
    drafter: Any, target: PreTrainedModel, verifier: Verifier, config: GenerationConfig, form: str, num_rows: int
) -> CostModel | None:
    """What is known of the drafter from earlier calls; None where options or verifier forbid to tune.

    Rows leave one by one, so that numbers up to the same power of 2 share their costs.
    """
    options = drafter.generation_config
    if not options.tune or not (verifier.keeps_seeded_text or not options.deterministic):
        return None

    sampling = round(config.temperature or 1.0, 1) if config.do_sample else None  # servers get any
    machine = (target.device, target.dtype, torch.get_num_threads())
    bucket = 1 << (num_rows - 1).bit_length()
    return cost_model_of(drafter, target, (*machine, bucket, form, verifier.name, sampling))
