"""Several texts in one row: the rows are filled with whole conversations, and models are told where each begins."""

from bisect import bisect_left, insort
from itertools import chain
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..core.masks import additive, within_reach
from ..core.packing import one_text, same_text
from ..errors import OptionError
from ..generation.model_parts import device_of, layer_kinds, masks_by_kind
from .dataset import ConversationDataset
from .row_encoding import Example

# Without a mask, most models find where texts begin from their positions. Others need a mask.
Boundaries = Literal["positions", "masks"]

_LENGTHS = (9, 14)  # tokens of the two texts in a row
_TOLERANCE = 0.1  # of the error that a missing boundary makes
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_FOUND: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], Boundaries]] = WeakKeyDictionary()


class PackedConversations(Dataset[Example]):
    """Rows of complete conversations, one after the other; `position_ids` start at 0 with each of them.

    Args:
        data ([`ConversationDataset`] or [`FeatureCache`]): The conversations.
        bins (`list[list[int]]`): The indices of the conversations in each row.
    """

    def __init__(self, data: Any, bins: list[list[int]]) -> None:
        self.data = data
        self.bins = bins

    @classmethod
    def fill(cls, data: Any, row_length: int, seed: int) -> "PackedConversations":
        """Fill rows of up to `row_length` tokens by [`best_fit`]; the same lengths and seed give the same rows."""
        return cls(data, best_fit(data.lengths, row_length, torch.Generator().manual_seed(seed)))

    @property
    def conversations(self) -> ConversationDataset:
        """The conversations without features."""
        conversations: ConversationDataset = self.data.conversations
        return conversations

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row."""
        lengths = self.data.lengths
        return [sum(lengths[index] for index in row) for row in self.bins]

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Example:
        parts = [self.data[member] for member in self.bins[index]]
        positions: list[int] = []
        for part in parts:
            positions += range(len(part["input_ids"]))

        row: Example = {"position_ids": positions}
        for name, first in parts[0].items():
            values = [part[name] for part in parts]
            row[name] = torch.cat(values) if isinstance(first, Tensor) else list(chain(*values))
        return row


def best_fit(lengths: list[int], row_length: int, generator: torch.Generator) -> list[list[int]]:
    """Pack conversations into bins: the longest first, each into the fullest bin that has room (best-fit decreasing).

    There are at most 11/9 times as many bins as possible, plus 4 (D. S. Johnson et al., "Worst-case performance bounds
    for simple one-dimensional packing algorithms", SIAM J. Comput. 3, 1974).

    Conversations of the same length are shuffled by `generator`.

    Raises:
        [`OptionError`]: a conversation is longer than a bin.

    Example:

    ```python
    >>> best_fit([3, 5, 2], 5, torch.Generator().manual_seed(0))
    [[1], [0, 2]]

    ```
    """
    if max(lengths, default=0) > row_length:
        raise OptionError(
            f"Rows of {row_length} tokens must hold every conversation, but the longest has {max(lengths)}. Raise the "
            "length of rows, or lower `max_length` of the conversations."
        )

    bins: list[list[int]] = []
    has_room: list[tuple[int, int]] = []  # free tokens and number of each bin that is not full, ascending
    order = torch.randperm(len(lengths), generator=generator).tolist()
    for index in sorted(order, key=lambda index: -lengths[index]):
        tightest = bisect_left(has_room, (lengths[index], 0))
        if tightest < len(has_room):
            free, number = has_room.pop(tightest)
        else:
            free, number = row_length, len(bins)
            bins.append([])

        bins[number].append(index)
        if free > lengths[index]:
            insort(has_room, (free - lengths[index], number))

    return bins


def packed_inputs(model: PreTrainedModel, part: nn.Module, position_ids: Tensor) -> dict[str, Any]:
    """The inputs that a model needs with packed rows, so that no text sees another.

    The first call compares texts in packed rows with the same texts alone, and remembers for each model which inputs
    it needs.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model.
        part (`nn.Module`): The module that reads the rows: the model, or its decoder.
        position_ids (`torch.Tensor` of shape `(rows, tokens)`): See `core/packing.py`.

    Raises:
        [`OptionError`]: texts see one another with all of these inputs, or the model is recurrent.
    """
    num_rows = min(len(position_ids), 2)  # flash attention finds texts in batches of one row only
    key = (str(model.config._attn_implementation), str(num_rows), str(model.device), str(part is model))
    known = _FOUND.setdefault(model, {})
    if key not in known:
        known[key] = _find_boundaries(model, part, num_rows)
    return _inputs(model, position_ids, known[key])


@torch.no_grad()
def _find_boundaries(model: PreTrainedModel, part: nn.Module, num_rows: int) -> Boundaries:
    """The first inputs with which the model reads texts in one row as it reads them alone."""
    if model._is_stateful:  # a state that forgets quickly would pass the comparison
        raise OptionError(_refusal(model, "keeps a recurrent state, which goes on from text to text"))

    attention = str(model.config._attn_implementation)
    tried: list[Boundaries] = ["positions"]
    if "flash" not in attention and "flex" not in attention:
        tried.append("masks")

    failures = []
    was_training = model.training
    model.eval()
    try:
        for boundaries in tried:
            try:
                error, control_error = _errors(model, part, num_rows, boundaries)
            except _FAILURES as failure:
                failures.append(f"with {boundaries} it fails: {failure}")
                continue
            if error <= _TOLERANCE * control_error:
                return boundaries
            failures.append(f"with {boundaries} it is off by {error:.2g}, and by {control_error:.2g} without")
    finally:
        model.train(was_training)

    raise OptionError(_refusal(model, f"does not ({attention}, {num_rows} rows; {'; '.join(failures)})"))


def _errors(model: PreTrainedModel, part: nn.Module, num_rows: int, boundaries: Boundaries) -> tuple[float, float]:
    """The largest change that first texts cause in the states of second texts: with boundaries, and without."""
    first, second = _LENGTHS
    device = device_of(model)
    numbers = torch.arange(num_rows * (first + second), device=device).view(num_rows, -1)
    ids = (numbers * 7 + 3) % model.config.get_text_config(decoder=True).vocab_size
    joined = one_text(first + second, device).expand(num_rows, -1)
    packed = joined.where(joined < first, joined - first)

    alone = part(input_ids=ids[:, first:], **_inputs(model, joined[:, :second], "positions"))[0].float()
    unmarked = part(input_ids=ids, **_inputs(model, joined, "positions"))[0][:, first:].float()
    marked = part(input_ids=ids, **_inputs(model, packed, boundaries))[0][:, first:].float()
    return (marked - alone).abs().max().item(), (unmarked - alone).abs().max().item()


def _inputs(model: PreTrainedModel, positions: Tensor, boundaries: Boundaries) -> dict[str, Any]:
    """The positions and, if asked for, masks: a token sees its text up to itself, in the layer's window or chunk."""
    inputs: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if boundaries == "positions":
        return inputs

    config = model.config.get_text_config(decoder=True)
    causal = (positions[:, None] <= positions[..., None]) & same_text(positions)
    masks = {}
    for kind in layer_kinds(config):
        seen = within_reach(causal, positions, positions, kind.sliding_window, kind.chunk_size)
        masks[kind.name] = additive(seen, model.dtype)

    inputs["attention_mask"] = masks_by_kind(config, masks)
    return inputs


def _refusal(model: PreTrainedModel, what: str) -> str:
    return (
        f"Packing needs a model that reads several texts in one row as it reads each alone, but "
        f"`{type(model).__name__}` {what}. "
        "Leave out `--packing`. Another `attn_implementation` of the target or batches of one row may help, and with "
        "`--cache_features` the target reads every text alone."
    )
