"""Share of texts that are the target's own, token for token, with its interval, and where the others first differ."""

from typing import Any

import datasets
import evaluate

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.parity import first_difference
from transformers_falcon_spec.evaluation.summary import wilson_interval

INPUTS = """
Args:
    predictions: Token ids of each text with the drafter, without the prompt.
    references: Token ids of the text of the target alone, from the same prompt and seed.

Returns:
    identical_share: Share of equal texts, with identical_share_interval (95 %, Wilson).
    num_identical, num_texts: The counts behind it.
    first_differences: For each text the index of the first token that differs, None where there is none.
"""


class TokenParity(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
    """Counts differences without explaining them: `falcon-spec parity` says which are ties of rounding."""

    def _info(self) -> Any:
        ids = {name: datasets.Sequence(datasets.Value("int64")) for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="Share of texts that are token for token the same with a drafter and without.",
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(ids),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, Any]:
        if not predictions:
            raise OptionError("A metric must be computed over at least one row, but there is none.")
        if any(ids is None or None in ids for ids in [*predictions, *references]):
            raise OptionError("A text must be a list of token ids, but some text or token is missing.")
        differences = [
            first_difference(plain, drafted) for drafted, plain in zip(predictions, references, strict=True)
        ]
        num_identical = differences.count(None)
        return {
            "identical_share": num_identical / len(differences),
            "identical_share_interval": wilson_interval(num_identical, len(differences)),
            "num_identical": num_identical,
            "num_texts": len(differences),
            "first_differences": differences,
        }
