"""The examination by the doctor: its checks in order; it ends early where a fault makes the other checks pointless."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.base import DrafterModel
from ..prompts import Prompt
from .measurement import Measurement, verdict_of
from .promise import Promise
from .surroundings import contract, reading, template
from .verdicts import TEMPLATE_MASK, Report


@dataclass(frozen=True)
class Case:
    """Who is examined, and with which texts.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        drafter ([`DrafterModel`]): The drafter, in the target's type and on its device.
        prompts (`Sequence[Prompt]`): What to write after.
        max_new_tokens (`int`): Most tokens of a text.
        promise ([`Promise`], *optional*): What the drafter should bring.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel
    prompts: Sequence[Prompt]
    max_new_tokens: int
    promise: Promise | None = None


def examine(case: Case, report: Report) -> None:
    """Make every check and write sections and verdicts into the report.

    Raises:
        [`BenchmarkError`]: a text could not be written.
    """
    report.sections["contract"], found, fits = contract(case.drafter, case.target, case.tokenizer)
    report.verdicts += found
    report.sections["reading"], found, can_verify = reading(case.target)
    report.verdicts += found
    report.sections["template"], found = template(case.tokenizer)
    report.verdicts += found
    if not (fits and can_verify):
        return
    measured = Measurement.of(case.target, case.tokenizer, case.drafter, case.prompts, case.max_new_tokens)
    explained_by = [verdict.name for verdict in report.verdicts if verdict.name != TEMPLATE_MASK]
    acceptance, costs = measured.acceptance(case.promise), measured.costs()
    report.sections["acceptance"] = acceptance | {"explained_by": explained_by if acceptance["is_low"] else []}
    report.sections["costs"] = costs
    last = verdict_of(acceptance, costs, explained_by)
    report.verdicts += [] if last is None else [last]
