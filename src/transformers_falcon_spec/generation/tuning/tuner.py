"""Chooses how much is drafted: the costs and tokens of past steps become prices of nodes and passes, in tokens.

A step that takes p passes of the drafter and reads n nodes costs draft(p) + read(n) seconds and brings one token and
what it keeps of the draft. Most tokens a second come from steps that each maximise tokens - rate * seconds, `rate`
being the tokens a second that come of it (W. Dinkelbach, On nonlinear fractional programming, 1967). So a node pays
while its probability is above rate * read'(n), a pass while it is expected to add more than rate * draft'(p), and
drafting while drafted steps beat plain ones. Token matching takes the target's tokens whatever was drafted, so that
none of this changes the text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...core.verification import AcceptedPath
from ..drafting import Draft, DraftBudget
from ..verifier import Verifier
from .cost_model import WARM_UP, CostModel, cost_model_of

CADENCE = 16  # steps between two looks at the prices
UNREAD = 8  # after so many plain steps the drafter reads much text first, and its seconds are not typical


class Tuner:
    """Chooses the budget of every step of one call by a cost model; without one nothing is tuned."""

    def __init__(self, cost_model: CostModel | None, device: torch.device | None) -> None:
        self.cost_model = cost_model
        self.device = device  # None: nobody waits, the device takes the time itself
        # steps of this call, by what they took
        self.num_nodes = Counter[int]()
        self.num_passes = Counter[int]()
        self.num_asked = 0
        self._is_asked = False  # whether the newest step asked for a draft
        self._num_unread = UNREAD  # steps since the last draft
        self._seconds = (0.0, 0.0)  # of drafting and reading, before this step
        self.is_fixed = False  # drafts have a few fixed shapes, and none is priced node by node

    def wait(self) -> None:
        """Wait for the device, so that its work is counted in the phase that caused it."""
        if self.cost_model is not None and self.device is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def limited(self, budget: DraftBudget) -> DraftBudget | None:
        """The budget of the next step within `budget`; None for a plain one."""
        known = self.cost_model
        if known is None:
            return budget

        limits = dict[str, Any]()
        if self.is_fixed:
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
                known.prices = known.new_prices(budget.num_nodes)
            limits["prices"] = known.prices_now() if self._is_asked else None

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
        num_kept = [path.num_accepted for path in paths]
        before, self._seconds = self._seconds, (draft_seconds, read_seconds)
        is_asked, self._is_asked = self._is_asked and not draft.is_text_alone, False
        known = self.cost_model
        if known is None or not num_kept:
            return

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
        if self.is_fixed and is_asked:
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
