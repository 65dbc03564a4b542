"""The inputs with which a model reads several texts in one row as it reads each alone, found by trying them."""

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.masks import additive, within_reach
from ..core.packing import one_text, same_text
from ..errors import OptionError
from ..generation.model_parts import device_of, layer_kinds, masks_by_kind

# Without a mask, most models find where texts begin from their positions. Others need a mask.
Boundaries = Literal["positions", "masks"]

_LENGTHS = (9, 14)  # tokens of the two texts in a row
_TOLERANCE = 0.1  # of the error that a missing boundary makes
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_FOUND: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], Boundaries]] = WeakKeyDictionary()


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
    tried: tuple[Boundaries, ...] = (
        ("positions",) if "flash" in attention or "flex" in attention else ("positions", "masks")
    )
    failures, was_training = [], model.training
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
    vocab_size, (first, second) = model.config.get_text_config(decoder=True).vocab_size, _LENGTHS
    ids = torch.arange(num_rows * (first + second), device=device_of(model)).view(num_rows, -1)
    ids = (ids * 7 + 3) % vocab_size
    joined = one_text(first + second, device_of(model)).expand(num_rows, -1)
    packed = joined.where(joined < first, joined - first)
    alone = part(input_ids=ids[:, first:], **_inputs(model, joined[:, :second], "positions"))[0].float()
    unmarked = part(input_ids=ids, **_inputs(model, joined, "positions"))[0][:, first:].float()
    marked = part(input_ids=ids, **_inputs(model, packed, boundaries))[0][:, first:].float()
    return (marked - alone).abs().max().item(), (unmarked - alone).abs().max().item()


def _inputs(model: PreTrainedModel, positions: Tensor, boundaries: Boundaries) -> dict[str, Any]:
    """The positions and, if asked for, masks: a token sees its text up to itself, in the layer's window or chunk."""
    inputs: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if boundaries == "masks":
        config, masks = model.config.get_text_config(decoder=True), {}
        causal = (positions[:, None] <= positions[..., None]) & same_text(positions)
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
