"""What must be known of all rows before a drafter learns from them: whether they can be read, and what they teach."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..drafters.config_fields import context_of
from ..errors import TrainingError
from .features import TargetFeatures


@dataclass(frozen=True)
class DataSurvey:
    """Facts about all rows of a data set; rows of several conversations are looked at one by one."""

    num_rows: int
    num_idle_rows: int  # in which the assistant says nothing that the drafter could draft
    usable_row: int  # the first of the others, among the rows that batches are made of
    digest: str  # of token ids and masks, in their order


def survey(data: Any, features: TargetFeatures, what: str) -> DataSurvey:
    """Look at every row of a data set once, without cached features.

    Args:
        data (`Dataset`): Rows of `input_ids` and `assistant_mask`.
        features ([`TargetFeatures`]): They say which tokens count, and which target reads the rows.
        what (`str`): What the data are, for messages.

    Raises:
        [`TrainingError`]: not one token can be drafted, or a row has tokens that the target does not know, or more
            than it has positions for.
    """
    rows = getattr(data, "conversations", data)
    target = features.target
    num_known = len(target.get_input_embeddings().weight)
    context = context_of(target.config)
    digest, num_idle_rows, usable = hashlib.sha256(), 0, None

    for index in range(len(rows)):
        row = rows[index]
        ids = np.asarray(row["input_ids"], dtype=np.int64)
        mask = np.asarray(row["assistant_mask"], dtype=bool)
        _check_row(ids, num_known, context, f"{what}, {_origin(rows, index)}")
        digest.update(ids.tobytes() + mask.tobytes() + b"|")
        if not mask[features.distance + 1 :].any():
            num_idle_rows += 1
        elif usable is None:
            usable = index

    if usable is None:
        raise TrainingError(
            f"{what.capitalize()} must hold at least one assistant token that can be drafted; raise `max_length`. The "
            f"first {features.distance + 1} tokens of a text cannot be drafted, and this is so of all that the "
            f"assistant says in {len(rows)} rows."
        )
    return DataSurvey(len(rows), num_idle_rows, _packed_row(data, usable), digest.hexdigest())


def _check_row(ids: Any, num_known: int, context: int | None, where: str) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_known:
        raise TrainingError(
            f"Token ids must lie in 0..{num_known - 1}, for the target has {num_known} embeddings, but {where}, holds "
            f"{ids.max() if ids.max() >= num_known else ids.min()}. Take the target's own tokenizer; where tokens "
            "were added to it, resize the target's embeddings and train them."
        )
    if context is not None and len(ids) > context:
        raise TrainingError(
            f"A row must fit into the target's context of {context} tokens, but {where}, has {len(ids)}. Cut it, or "
            "give conversations under `messages`, which are cut to `max_length`."
        )


def _origin(rows: Any, index: int) -> str:
    """Where a row comes from, in words."""
    origins = getattr(rows, "origins", None)
    return f"example {index}" if origins is None else str(origins[index])


def _packed_row(data: Any, usable: int) -> int:
    """The index of the row that holds a conversation."""
    bins = getattr(data, "bins", None)
    if bins is None:
        return usable
    return next(number for number, members in enumerate(bins) if usable in members)
