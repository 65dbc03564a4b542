"""The head of a target: what makes logits of the decoder's last hidden state, found in the model's own forward.

Between the two may stand more than one matrix: a norm and a layer before it, a scale, a cap. So the model's forward
itself runs, with the states in place of the decoder. Where that gives what the output matrix alone gives, as in most
models, the matrix is called instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..errors import TargetError
from .model_parts import (
    changed_copy,
    decoder_of,
    decoder_path,
    device_of,
    holds,
    in_layers,
    named,
    once_a_model,
    path_of,
)

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_NUM_DIMS = 3  # rows, tokens, width
_UNITS_AT_A_TIME = 64  # so that their logits take little memory


def apply_head(model: PreTrainedModel, features: Tensor, rows: nn.Module | None = None) -> Tensor:
    """The model's logits `[..., vocab]` in float32 of what its head reads, `[..., width]`.

    With [`head_rows`] they are those of some tokens alone.

    Raises:
        [`TargetError`]: the model's forward makes no logits of these states.
    """
    states = features if features.dim() == _NUM_DIMS else features.reshape(1, -1, features.shape[-1])
    states = states.to(model.dtype)  # a drafter may compute in another type than the target
    matrix = model.get_output_embeddings() if rows is None else rows
    logits = matrix(states) if _is_bare(model) else _logits_after(model, states, rows)
    return logits.float().reshape(*features.shape[:-1], -1)


def apply_matrix(model: PreTrainedModel, features: Tensor, rows: nn.Module | None = None) -> Tensor:
    """What the output matrix alone gives, without a scale or a cap that the model may have.

    Raises:
        [`TargetError`]: more than a matrix, a scale and a cap stands between the last hidden state and the logits.
    """
    matrix = model.get_output_embeddings()
    width = head_width(model)
    if getattr(matrix, "in_features", width) != width:
        raise TargetError(
            f"The output matrix of {named(model)} must read the last hidden state, of width {width}, but it reads "
            f"{matrix.in_features} values that other layers make of it. Take a drafter that uses the whole head, such "
            "as Falcon or Eagle."
        )

    return (matrix if rows is None else rows)(features.to(model.dtype)).float()


@torch.inference_mode(False)  # they outlive the call
@torch.no_grad()
def head_rows(model: PreTrainedModel, token_ids: Tensor) -> nn.Linear:
    """The rows of the output matrix for tokens `[tokens]`, a layer that gives their logits alone.

    It is a copy, of the weights as they are now. Weights that are packed, offloaded or adapted are read through the
    matrix itself, which is applied to unit vectors.
    """
    matrix = model.get_output_embeddings()
    if type(getattr(matrix, "weight", None)) is nn.Parameter and _is_plain(matrix):
        weight = matrix.weight[token_ids.to(matrix.weight.device)]
        bias = None if matrix.bias is None else matrix.bias[token_ids.to(matrix.bias.device)]
    else:
        weight, bias = _observed_rows(matrix, token_ids, matrix.in_features, model)

    return layer_of(weight, bias)


def layer_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A frozen linear layer that has these very tensors."""
    layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _is_plain(matrix: nn.Module) -> bool:
    """Whether its output is what its weights say: nothing stands around them."""
    return isinstance(matrix, nn.Linear) and matrix.weight.device.type != "meta" and not hasattr(matrix, "_hf_hook")


def _observed_rows(matrix: Any, token_ids: Tensor, width: int, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Weights `[tokens, width]` and biases `[tokens]` of a matrix that is applied to unit vectors, some at a time."""
    device = device_of(model)
    bias = matrix(torch.zeros(1, width, device=device, dtype=model.dtype))[0]
    token_ids = token_ids.to(bias.device)
    columns = []
    for units in torch.eye(width, device=device, dtype=model.dtype).split(_UNITS_AT_A_TIME):
        columns.append((matrix(units) - bias)[:, token_ids])
    return torch.cat(columns).T.contiguous(), bias[token_ids]


@once_a_model
def head_width(model: PreTrainedModel) -> int:
    """Width of what the head reads; the hidden size, unless the decoder ends in a projection (OPT-350m)."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    in_features = getattr(model.get_output_embeddings(), "in_features", None)
    return hidden_size if in_features == hidden_size else _observed_width(model)


def inner_width(model: PreTrainedModel) -> int:
    """Width between the two halves of a feed-forward layer; the widest one where layers differ (Gemma 3n)."""
    size = in_layers(model.config.get_text_config(decoder=True), "intermediate_size")[0]
    return max(size) if isinstance(size, list) else size or 4 * head_width(model)


def feature_width(model: PreTrainedModel, feature_layers: Sequence[int]) -> int:
    """Width of one token's features; -1 is the input of the head."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    return sum(head_width(model) if layer == -1 else hidden_size for layer in feature_layers)


@torch.no_grad()
def _observed_width(model: PreTrainedModel) -> int:
    """The width of the decoder's output, seen where the model reads one token."""
    widths: list[int] = []

    def see(_decoder: nn.Module, _inputs: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        widths.append(states.shape[-1])

    hook = decoder_of(model).register_forward_hook(see)

    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model)), use_cache=False)
    except _FAILURES as error:
        raise TargetError(f"{named(model)} must read a token, but that fails: {error}") from error
    finally:
        hook.remove()

    return widths[-1]


@once_a_model
@torch.no_grad()
def _is_bare(model: PreTrainedModel) -> bool:
    """Whether the output matrix is the whole head: it gives the logits that the model's forward gives."""
    width = head_width(model)
    states = torch.arange(2 * width, device=device_of(model)).sin().reshape(1, 2, width).to(model.dtype)
    expected = _logits_after(model, states)
    try:
        return torch.equal(model.get_output_embeddings()(states).float(), expected.float())
    except _FAILURES:
        return False


def _logits_after(model: PreTrainedModel, states: Tensor, rows: nn.Module | None = None) -> Tensor:
    """The logits `[rows, tokens, vocab]` of the model's forward, in which the decoder's output is `states`.

    `rows` stand in for the output matrix.
    """
    path = _outer_path(model)
    stand_ins: dict[str, Any] = {path: _Given(model.get_submodule(path), states)}
    if rows is not None:
        stand_ins[_matrix_path(model)] = rows
    twin: Any = model
    for name, stand_in in stand_ins.items():
        twin = _twin(twin, name, stand_in)
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    try:
        logits: Tensor = type(model).forward(twin, input_ids=ids).logits
    except _FAILURES as error:
        raise TargetError(f"{_refusal(model)} Its forward fails: {type(error).__name__}: {error}") from error

    if logits.shape[:2] != states.shape[:2]:
        raise TargetError(f"{_refusal(model)} It gives logits {list(logits.shape)} of states {list(states.shape)}.")

    return logits


def _refusal(model: PreTrainedModel) -> str:
    return (
        f"The forward of `{type(model).__name__}` must make logits of its last hidden state alone, for drafters that "
        "use the target's head. Take one that does not, such as a `LookaheadDrafter`."
    )


@once_a_model
def _outer_path(model: PreTrainedModel) -> str:
    """The name of the part of a model that stands for its decoder: the largest without the head."""
    names = decoder_path(model)
    if not names:
        raise TargetError(f"{_refusal(model)} It has no decoder apart from its head.")

    matrix = model.get_output_embeddings()
    part: Any = model
    path: list[str] = []
    for name in names.split("."):
        part = getattr(part, name)
        path.append(name)
        if not holds(part, matrix):
            break

    return ".".join(path)


@once_a_model
def _matrix_path(model: PreTrainedModel) -> str:
    """The name of the output matrix in its model."""
    return path_of(model, model.get_output_embeddings())


def _twin(part: nn.Module, path: str, stand_in: Any) -> nn.Module:
    """A copy of a part that shares everything with it, apart from the module of this path, which has a stand-in.

    The part itself stays as it is, for other threads may be using it.
    """
    name, _, rest = path.partition(".")
    inner = part.get_submodule(name)
    twin = changed_copy(part, _modules={**part._modules, name: _twin(inner, rest, stand_in) if rest else stand_in})
    vars(twin).pop("forward", None)  # of Accelerate, which is bound to the part itself
    return twin


class _Output(BaseModelOutputWithPast):
    """A last hidden state, and None for whatever else a forward may ask of its decoder's output."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given:
    """Stands in for a part of a model, with all it holds, whose output is known."""

    def __init__(self, part: nn.Module, states: Tensor) -> None:
        self._part, self._states = part, states

    def __call__(self, *_: Any, **__: Any) -> _Output:
        """The states as the part's output."""
        return _Output(last_hidden_state=self._states)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        is_larger_part = isinstance(value, PreTrainedModel)  # OPT's forward calls the decoder inside
        return _Given(value, self._states) if is_larger_part else value
