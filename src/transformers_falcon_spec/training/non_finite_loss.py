"""The error for a loss that is not finite, which names the rows of the batch and the newest checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import TrainingError
from .checkpoints import newest_complete_checkpoint
from .dataset import ConversationDataset

NUM_NAMED = 16  # rows that the message names


def row_origins(data: Any, batch: dict[str, Tensor]) -> list[str]:
    """The origins of the conversations in a collated batch, found by their token ids.

    `data` is the data set that the batch comes from, a mapping of names to such, or None.
    """
    conversations = _conversations(batch)
    names: dict[tuple[int, ...], str] = {}
    for each in data.values() if isinstance(data, Mapping) else [data or []]:
        dataset = getattr(each, "conversations", each)  # without features
        for index in range(len(dataset)):
            key = tuple(dataset[index]["input_ids"])
            if key in conversations and key not in names:
                names[key] = dataset.origins[index] if isinstance(dataset, ConversationDataset) else f"example {index}"
    return [names.get(key, "a row that is not in the data set") for key in conversations]


def _conversations(batch: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The token ids of each conversation in a batch, without padding."""
    found = []
    ids, lengths = batch["input_ids"].tolist(), batch["attention_mask"].sum(-1).tolist()
    positions = batch["position_ids"].tolist() if "position_ids" in batch else [range(len(row)) for row in ids]
    for row, row_positions, length in zip(ids, positions, lengths, strict=True):
        starts = [start for start in range(length) if row_positions[start] == 0]
        found += [tuple(row[start:end]) for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found


def non_finite_loss_error(what: str, step: int, rows: list[str], output_dir: str | Path) -> TrainingError:
    """The error that stops the run at a step, counted from 1; `what` ends a sentence about the loss."""
    more = f" and {len(rows) - NUM_NAMED} more" if len(rows) > NUM_NAMED else ""
    checkpoint = newest_complete_checkpoint(output_dir)
    kept = (
        f"`{checkpoint}` was checked when it was written and stays; going on from it keeps its learning rate."
        if checkpoint
        else "No checkpoint was written before."
    )
    return TrainingError(
        f"The loss must stay a finite number, but at step {step} {what}. Rows of the batch: "
        f"{'; '.join(rows[:NUM_NAMED])}{more}. Start anew with a lower `--learning_rate` or more `--warmup_steps`; if "
        f"it happens at the first step, look at these rows and at the target's dtype. {kept}"
    )
