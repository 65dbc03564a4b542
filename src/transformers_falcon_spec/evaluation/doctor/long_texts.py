"""Whether texts get longer than those that a drafter learned from, where it looks back over all of them."""

from collections.abc import Mapping
from typing import Any

from ...drafters.base import DrafterModel
from .findings import LONG_TEXTS, Report


def check_length(drafter: DrafterModel, longest: int, record: Mapping[str, Any], report: Report) -> None:
    """Report the trained length and the window of a drafter, and find texts up to `longest` tokens beyond both.

    The trained length stands in the record of the training, else it is the context in the drafter's config. Drafters
    without a window of their own have no attention over the text, or a whole model's.
    """
    if not drafter.has_window:
        return
    trained = record.get("trained_length", drafter.config.max_position_embeddings)
    section = {"longest_text": longest, "trained_length": trained, "sliding_window": drafter.sliding_window}
    report.sections["length"] = section
    if min(longest, drafter.sliding_window or longest) > trained:
        report.add(
            LONG_TEXTS,
            f"Texts get up to {longest:,} tokens long, and the drafter looks back over more than the {trained:,} of "
            "which it learned: drafts get worse beyond.",
            f"Set `sliding_window` to {trained} in its `config.json`, or `drafter.generation_config.sliding_window`.",
        )
