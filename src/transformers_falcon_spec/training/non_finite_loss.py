"""A loss that is no number any more: which rows it happened on, what is left of the run, and what to do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import TrainingError
from .checkpoints import newest_whole_checkpoint
from .dataset import ConversationDataset
from .feature_cache import FeatureCache
from .packed_conversations import PackedConversations

NUM_NAMED = 16  # rows that a message names


def row_origins(data: Any, batch: dict[str, Tensor]) -> list[str]:
    """Where the conversations of a collated batch come from, found by their token ids: asked once, when all is over.

    Args:
        data (a dataset, a mapping of names to datasets, or None): What the batch was made of.
        batch (`dict[str, torch.Tensor]`): `input_ids`, `attention_mask` and, of packed rows, `position_ids`, all
            `[rows, tokens]`.
    """
    wanted = _conversations(batch)
    names: dict[tuple[int, ...], str] = {}
    for each in data.values() if isinstance(data, Mapping) else [data or []]:
        packed = each.data if isinstance(each, PackedConversations) else each
        dataset = packed.dataset if isinstance(packed, FeatureCache) else packed  # the same, without reading features
        for index in range(len(dataset)):
            key = tuple(dataset[index]["input_ids"])
            if key in wanted and key not in names:
                names[key] = dataset.origins[index] if isinstance(dataset, ConversationDataset) else f"example {index}"
    return [names.get(key, "a row that is not in the data set") for key in wanted]


def _conversations(batch: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The token ids of each, without padding."""
    found = []
    ids, lengths = batch["input_ids"].tolist(), batch["attention_mask"].sum(-1).tolist()
    positions = batch["position_ids"].tolist() if "position_ids" in batch else [range(len(row)) for row in ids]
    for row, places, length in zip(ids, positions, lengths, strict=True):
        starts = [start for start in range(length) if places[start] == 0]
        found += [tuple(row[start:end]) for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found


def non_finite_loss_error(what: str, step: int, rows: list[str], output_dir: str | Path) -> TrainingError:
    """The error that stops the run.

    Args:
        what (`str`): What is no finite number: the subject is the loss.
        step (`int`): The step, counted from 1.
        rows (`list[str]`): Where the rows of its batch come from.
        output_dir (`str` or `Path`): Where checkpoints are.
    """
    more = f" and {len(rows) - NUM_NAMED} more" if len(rows) > NUM_NAMED else ""
    checkpoint = newest_whole_checkpoint(output_dir)
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
