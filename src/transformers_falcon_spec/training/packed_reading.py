"""Does a model read several texts in one row as it reads each alone? Asked of the model itself, never of a list of names."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import OptionError

_LENGTHS = (9, 14)  # tokens of the two texts in a row
_TOLERANCE = 0.1  # of the error of a reading without a boundary
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_CHECKED: WeakKeyDictionary[PreTrainedModel, set[tuple[str, ...]]] = WeakKeyDictionary()


def packed_inputs(position_ids: Tensor) -> dict[str, Any]:
    """What tells a model of Transformers where texts begin: it looks for that in positions where no mask is given."""
    return {"position_ids": position_ids, "use_cache": False}


@torch.no_grad()
def check_reads_packed(model: PreTrainedModel, part: nn.Module, num_rows: int) -> None:
    """Compare texts in packed rows with the same texts alone; remembered per model.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model; left as it is.
        part (`nn.Module`): What reads the rows: the model, or its decoder.
        num_rows (`int`): Rows of a batch: flash attention finds texts in batches of one row only.

    Raises:
        [`OptionError`]: what one text says reaches the other, or the model is recurrent.
    """
    rows = min(num_rows, 2)
    key = (str(model.config._attn_implementation), str(rows), str(model.device), str(part is model))
    if key in _CHECKED.setdefault(model, set()):
        return
    if model._is_stateful:  # a state that happens to forget quickly would pass
        raise OptionError(_refusal(model, "keeps a recurrent state, which goes on from text to text"))
    was_training = model.training
    vocab_size = model.eval().config.get_text_config(decoder=True).vocab_size
    try:
        error, control_error = _errors(part, rows, vocab_size)
    except _FAILURES as failure:
        raise OptionError(_refusal(model, f"fails: {failure}")) from failure
    finally:
        model.train(was_training)
    if not error <= _TOLERANCE * control_error:
        what = f"is off by {error:.2g} in what it says, and by {control_error:.2g} where it is told of no boundary"
        raise OptionError(_refusal(model, f"{what} (attention `{key[0]}`, {rows} rows)"))
    _CHECKED[model].add(key)


def _errors(part: nn.Module, num_rows: int, vocab_size: int) -> tuple[float, float]:
    """Largest differences in what is said of the second texts from the same texts alone: with boundaries told, and without."""
    device, (first, second) = next(part.parameters()).device, _LENGTHS
    ids = torch.arange(num_rows * sum(_LENGTHS), device=device).view(num_rows, -1)
    ids = (ids * 7 + 3) % vocab_size
    through = torch.arange(ids.shape[1], device=device).expand(num_rows, -1)
    packed = through.where(through < first, through - first)
    alone = part(input_ids=ids[:, first:], **packed_inputs(through[:, :second]))[0].float()
    told, untold = (
        part(input_ids=ids, **packed_inputs(positions))[0][:, first:].float() for positions in (packed, through)
    )
    return (told - alone).abs().max().item(), (untold - alone).abs().max().item()


def _refusal(model: PreTrainedModel, what: str) -> str:
    return (
        f"Packing needs a model that reads several texts in one row as it reads each alone, but `{type(model).__name__}` {what}. "
        "Leave out `--packing`; a target of another attention (`sdpa`), batches of one row, or `--cache_features` may also help."
    )
