"""One trial: a call is made without and with a drafter, and what came of it is the same, a tie, a refusal, or a difference."""

import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.trials.call import Call
from tests.trials.changes import CHANGES, OFFLOADS
from tests.trials.compare import batch_differences, differences, row_differences, split
from tests.trials.parts import target_of
from tests.trials.refusals import reason_of
from tests.trials.ties import is_tie, seeds_of
from tests.trials.written import Written, drafted, plain, silent
from transformers_falcon_spec import GenerationStats


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Args:
        kind (`str`): `"same"`, `"tie"`, `"refused"`, `"plain refuses"`, or `"different"`.
        found (`list[str]`): Differences, or the reason of a refusal.
        stats ([`GenerationStats`]): What speculation did.
    """

    kind: str
    found: list[str] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    def __str__(self) -> str:
        counts = f"{self.stats.num_drafted} drafted, {self.stats.num_accepted} kept in {self.stats.num_steps} steps"
        return "\n".join([f"{self.kind} ({counts})", *(f"- {each}" for each in self.found)])


def trial(call: Call) -> Outcome:
    """Make the call on both sides and compare."""
    target = target_of(call)
    with nullcontext() if call.change is None else (CHANGES | OFFLOADS)[call.change](target):
        return _tried(call, target)


def _tried(call: Call, target: Any) -> Outcome:
    references = _references(call, target)
    failed = next((each for each in references if each.error is not None), None)
    gold = None if failed or call.reference == "again" else _gold(references)
    ours = drafted(call, target, gold)
    if failed is not None and call.reference in {"silent", "again"}:  # the other side is the package's own, too
        without = plain(call, target)
        return _refused(call, failed) if without.error is None else _both_refuse(without, ours)
    if failed is not None:
        return _both_refuse(failed, ours)
    if ours.error is not None:
        return _refused(call, ours)
    kind, found = (_against_rows if call.reference == "rows" else _against_batch)(call, target, references, ours)
    found += [f"{each} changed" for each in ours.changed]
    return Outcome("different" if found else kind, found, ours.stats)


def _references(call: Call, target: Any) -> list[Written]:
    if call.reference == "rows":
        return [plain(call, target, row, seed) for row, seed in enumerate(seeds_of(call))]
    makers = {"plain": lambda: plain(call, target), "silent": lambda: silent(call, target)}
    return [makers.get(call.reference, lambda: drafted(call, target, None))()]


def _against_batch(call: Call, target: Any, references: list[Written], ours: Written) -> tuple[str, list[str]]:
    """What the comparison with one run of the whole batch says."""
    reference = references[0]
    is_split = split(call, reference, ours) is not None
    if is_split and call.reference != "again" and is_tie(call, target, None, _gold(references)):
        return "tie", []
    return "same", differences(call, reference, ours)


def _against_rows(call: Call, target: Any, rows: list[Written], ours: Written) -> tuple[str, list[str]]:
    """In a sampled batch every row draws from a seed of its own: it is compared with the row written alone from that seed."""
    kind, found = "same", batch_differences(call, ours)
    seeds_of(call)
    if not torch.equal(ours.state, torch.get_rng_state()):
        found.append("the global random state is not that after one draw")
    for row, alone in enumerate(rows):
        if split(call, alone, ours, row) is not None and is_tie(call, target, row, _gold(rows)):
            kind = "tie"
        else:
            found += row_differences(call, alone, ours, row)
    return kind, found


def _both_refuse(reference: Written, ours: Written) -> Outcome:
    """What plain decoding cannot do a drafter need not do, but it must not do something else."""
    if ours.error is None:
        return Outcome("different", [f"plain decoding raises {reference.error!r}, the drafter does not"], ours.stats)
    return Outcome("plain refuses", [f"{type(reference.error).__name__}: {reference.error}"], ours.stats)


def _refused(call: Call, ours: Written) -> Outcome:
    assert ours.error is not None
    reason = reason_of(call, ours.error)
    if reason is not None and not ours.changed:
        return Outcome("refused", [reason])
    where = "".join(traceback.format_exception(ours.error)[-4:])
    return Outcome("different", [*(f"{each} changed" for each in ours.changed), f"an error came of it:\n{where}"])


def _gold(references: list[Written]) -> Tensor:
    """The right text of all rows `[rows, tokens]`."""
    rows = [row for each in references if each.text is not None for row in each.text]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
