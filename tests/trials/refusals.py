"""What may be refused: each clear error with the calls that it is meant for. Anything else that is refused is a fault."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.thresholds import SCALINGS
from tests.trials.call import Call
from tests.trials.extras import MAY_REMEMBER, OF_BATCHES
from tests.trials.parts import DRAWING, READING_INNER
from transformers_falcon_spec import FalconSpecError
from transformers_falcon_spec.transformers_versions import FORGETS_DROPPED_TEXT, INSTALLED

PROBED = 10  # tokens that the probe reads one by one


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    Args:
        reason (`str`): Why, in a few words.
        message (`str`): A part of what is said.
        is_meant (`Callable`): Whether it is right to say it of a call.
    """

    reason: str
    message: str
    is_meant: Callable[[Call], bool]


def _shows_rows_together(call: Call) -> bool:
    """Whether a batch has processors or criteria of the caller's own."""
    return len(call.lengths) > 1 and bool({*MAY_REMEMBER, *OF_BATCHES} & {*call.extras})


def _drops_its_cache(call: Call) -> bool:
    """Whether Transformers before 5.20 forgets the text behind the length, for the model drops its cache there."""
    return FORGETS_DROPPED_TEXT and call.threshold in SCALINGS and call.family in {"phi3", "phi3_window", "phimoe"}


REFUSALS = (
    Refusal(
        "before Transformers 5.20, a model that drops its cache at a length the probe passes reads other tokens then",
        "Read twice one token at a time",
        lambda call: _drops_its_cache(call) and call.threshold_length < PROBED,
    ),
    Refusal(
        "before Transformers 5.20, a model that drops its cache at a length forgets the text",
        "drops its cache at",
        _drops_its_cache,
    ),
    Refusal(
        "before Transformers 5.21, longrope of kinds of layers fails behind its length, which the probe passes",
        "tokens and more fails",
        lambda call: INSTALLED < (5, 21) and call.threshold == "longrope" and call.threshold_length < PROBED,
    ),
    Refusal(
        "short convolutions take one row",
        "keeps a state of all it read, which rows cannot take back",
        lambda call: call.family == "lfm2" and len(call.lengths) > 1,
    ),
    Refusal(
        "rows that lag behind need what slid out of the cache",
        "have dropped what left their sliding window",
        lambda call: call.num_cached > 0 and len(call.lengths) > 1,
    ),
    Refusal(
        "hidden states of Gemma 3n have an axis more",
        "must be of shape [rows, tokens, hidden size]",
        lambda call: call.family.startswith("gemma3n") and call.drafter in READING_INNER,
    ),
    Refusal(
        "before Transformers 5.23, chunks of a prompt begin before what the cache holds",
        "reads tokens that the cache holds once more",
        lambda call: call.cache == "whole" and call.num_cached > 0 and "prefill_chunk_size" in call.decoding,
    ),
    Refusal(
        "rows that are shown together are not accepted by themselves",
        "must be shown all rows at one length",
        lambda call: _shows_rows_together(call) and call.reference == "again",
    ),
    Refusal(
        "a row that has ended has no scores to show",
        "would be shown the scores of rows that have ended",
        lambda call: _shows_rows_together(call) and "scores" in call.outputs and "eos_token_id" in call.decoding,
    ),
    Refusal(
        "rows that draft stand at slots of their own, which an index that must choose can see",
        "tokens that this target's index keeps",
        lambda call: (call.family == "deepseek_v32_sparse" or call.threshold == "index") and len(call.lengths) > 1,
    ),
    Refusal(
        "rows pass a switch of rotary frequencies one by one, and all rows have the same",
        "changes its rotary frequencies",
        lambda call: call.threshold in SCALINGS and len(call.lengths) > 1,
    ),
    Refusal(
        "Longcat counts two attentions a layer as layers",
        "need a list of 4 decoder layers; the target has none",
        lambda call: call.family == "longcat_flash" and call.drafter in READING_INNER,
    ),
    Refusal(
        "the rule needs draws, and the drafter draws nothing",
        "needs a draft that was drawn",
        lambda call: call.rule.needs_draft_probs and call.drafter not in DRAWING,
    ),
    Refusal(
        "guidance remembers what it read",
        "is not registered with `asks_in_order=True`",
        lambda call: "guidance_scale" in call.decoding and call.rule.needs_draft_probs,
    ),
)


def reason_of(call: Call, error: Exception | None) -> str | None:
    """Why the call may be refused with this error; None if it may not."""
    if not isinstance(error, FalconSpecError):
        return None
    found = (each.reason for each in REFUSALS if each.message in str(error) and each.is_meant(call))
    return next(found, None)
