"""How a model reads several texts in one row as it reads each alone; the model itself is asked."""

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.masks import additive, tree_mask
from ..core.packing import one_text, same_text
from ..errors import OptionError
from ..generation.layers import LayerKind, layer_kinds, masks_by_kind

Way = Literal[
    "positions", "masks"
]  # models look for texts in positions where no mask is given; some do not, but take masks

_LENGTHS = (9, 14)  # tokens of the two texts in a row
_TOLERANCE = 0.1  # of the error of a reading without a boundary
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_FOUND: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], Way]] = WeakKeyDictionary()


def packed_inputs(model: PreTrainedModel, part: nn.Module, position_ids: Tensor) -> dict[str, Any]:
    """What to give a model beside packed rows, so that no text reaches another.

    The first time, texts in packed rows are compared with the same texts alone; what is found is remembered per model.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model; left as it is.
        part (`nn.Module`): What reads the rows: the model, or its decoder.
        position_ids (`torch.Tensor` of shape `(rows, tokens)`): Place of each token in its text; see
            `core/packing.py`.

    Raises:
        [`OptionError`]: what one text says reaches the other whatever is given, or the model is recurrent.
    """
    num_rows = min(len(position_ids), 2)  # flash attention finds texts in batches of one row only
    key = (str(model.config._attn_implementation), str(num_rows), str(model.device), str(part is model))
    known = _FOUND.setdefault(model, {})
    if key not in known:
        known[key] = _way(model, part, num_rows)
    return _inputs(model, position_ids, known[key])


@torch.no_grad()
def _way(model: PreTrainedModel, part: nn.Module, num_rows: int) -> Way:
    """The first way that reads texts in rows as alone."""
    if model._is_stateful:  # a state that happens to forget quickly would pass
        raise OptionError(_refusal(model, "keeps a recurrent state, which goes on from text to text"))
    attention = str(model.config._attn_implementation)
    ways: tuple[Way, ...] = ("positions",) if "flash" in attention or "flex" in attention else ("positions", "masks")
    found, was_training = [], model.training
    model.eval()
    try:
        for way in ways:
            try:
                error, control_error = _errors(model, part, num_rows, way)
            except _FAILURES as failure:
                found.append(f"told by {way} it fails: {failure}")
                continue
            if error <= _TOLERANCE * control_error:
                return way
            found.append(f"told by {way} it is off by {error:.2g}, and by {control_error:.2g} without")
    finally:
        model.train(was_training)
    raise OptionError(_refusal(model, f"does not ({attention}, {num_rows} rows; {'; '.join(found)})"))


def _errors(model: PreTrainedModel, part: nn.Module, num_rows: int, way: Way) -> tuple[float, float]:
    """Largest differences of the second texts' outputs from those of the texts alone, with boundaries and without."""
    vocab_size, (first, second) = model.config.get_text_config(decoder=True).vocab_size, _LENGTHS
    ids = torch.arange(num_rows * (first + second), device=model.device).view(num_rows, -1)
    ids = (ids * 7 + 3) % vocab_size
    through = one_text(first + second, model.device).expand(num_rows, -1)
    packed = through.where(through < first, through - first)
    alone = part(input_ids=ids[:, first:], **_inputs(model, through[:, :second], "positions"))[0].float()
    untold = part(input_ids=ids, **_inputs(model, through, "positions"))[0][:, first:].float()
    told = part(input_ids=ids, **_inputs(model, packed, way))[0][:, first:].float()
    return (told - alone).abs().max().item(), (untold - alone).abs().max().item()


def _inputs(model: PreTrainedModel, position_ids: Tensor, way: Way) -> dict[str, Any]:
    inputs = {"position_ids": position_ids, "use_cache": False}
    return {**inputs, "attention_mask": _masks(model, position_ids)} if way == "masks" else inputs


def _masks(model: PreTrainedModel, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """Every token sees its own text up to itself, as far as its layer sees: the mask of a tree without a cache."""
    config = model.config.get_text_config(decoder=True)
    causal = (positions[:, None] <= positions[..., None]) & same_text(positions)

    def mask(kind: LayerKind) -> Tensor:
        seen = tree_mask(causal, positions, positions[:, :0], None, kind.sliding_window, kind.chunk_size)
        return additive(seen, model.dtype)

    return masks_by_kind(config, {kind.name: mask(kind) for kind in layer_kinds(config)})


def _refusal(model: PreTrainedModel, what: str) -> str:
    return (
        "Packing needs a model that reads several texts in one row as it reads each alone, but "
        f"`{type(model).__name__}` {what}. Leave out `--packing`. Another `attn_implementation` of the target or "
        "batches of one row may help, and with `--cache_features` the target reads every text alone."
    )
