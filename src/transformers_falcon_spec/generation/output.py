"""The outputs of a call besides its text: statistics, hidden states and attentions, and each step for observers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.stats import GenerationStats
from ..core.verification import AcceptedPath
from ..transformers_versions import CACHE
from .drafting import Draft
from .modes import variable_set
from .sequence_batch import SequenceBatch

Layers = tuple[Tensor | None, ...]  # one entry for each layer
_LAYER_STATES = {"hidden_states": -3, "attentions": 0}  # and their axis of rows; Gemma 3n's states have one before it
Observer = Callable[[Draft, Sequence[AcceptedPath]], None]  # given the draft of a step and each row's accepted path
_COLLECTORS: ContextVar[tuple[list[GenerationStats], ...]] = ContextVar("collectors", default=())
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())

CHANGED = (
    "Adapters, hooks or forwards of the target changed in the middle of this call: drafted tokens were read as it was "
    "before, where plain decoding would have noticed at the next token."
)
READ_ANEW = "A drafted token overflowed in the target, so the newest token of the text was read again without drafts."


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """A `GenerateDecoderOnlyOutput` that also says what speculation did."""

    speculation: GenerationStats | None = None  # counts, rates and seconds of the call


def generated(
    config: GenerationConfig, batch: SequenceBatch, states: "LayerStates", cache: Any, stats: GenerationStats
) -> Tensor | SpeculativeOutput:
    """What `generate` returns of a call that has ended."""
    if not config.return_dict_in_generate:
        return batch.sequences
    outputs: Any = {name: batch.outputs(name) for name in ("scores", "logits")}
    outputs |= {name: states.outputs(name) for name in ("hidden_states", "attentions")}
    sequences: Any = batch.sequences  # `LongTensor` there means any ids
    return SpeculativeOutput(sequences, **outputs, **{CACHE: cache}, speculation=stats)


class LayerStates:
    """Hidden states and attentions as `generate` gives them: of the prompt, then of each token; 0 in ended rows."""

    def __init__(self, config: GenerationConfig, windows: Sequence[int | None], num_rows: int = 1) -> None:
        is_dict = config.return_dict_in_generate
        self.wanted = [name for name in _LAYER_STATES if is_dict and getattr(config, f"output_{name}")]
        self._prompt: dict[str, Any] = {}
        self._rows: list[dict[str, list[Layers]]] = [{name: [] for name in self.wanted} for _ in range(num_rows)]
        self._windows = windows  # of each layer; None where it sees everything

    def add_prompt(self, outputs: Any) -> None:
        """Keep the states of the prompt, which the prefill gave."""
        self._prompt = {name: getattr(outputs, name) for name in self.wanted}

    def add_paths(
        self,
        outputs: Any,
        paths: Sequence[Sequence[int]],
        columns: Callable[[int | None, int], list[tuple[list[int], int]]],
        numbers: Sequence[int],
    ) -> None:
        """Keep the states of each row's accepted path; `columns` are [`Target.columns`].

        `numbers` says which rows of the call these are.
        """
        if "hidden_states" in self.wanted:
            for row, path in enumerate(paths):
                for node in path:
                    states = (layer[..., row : row + 1, node : node + 1, :] for layer in outputs.hidden_states)
                    self._rows[numbers[row]]["hidden_states"].append(tuple(states))

        if "attentions" in self.wanted:
            for row, path in enumerate(paths):
                for end in range(1, len(path) + 1):
                    weights = self._weights(outputs.attentions, row, path[:end], columns)
                    self._rows[numbers[row]]["attentions"].append(weights)

    def _weights(
        self, attentions: Sequence[Tensor | None], row: int, path: Sequence[int], columns: Callable[..., Any]
    ) -> tuple[Tensor | None, ...]:
        """The weights of a path's last node in every layer; an attention that gives none gives None."""
        if not attentions:  # as with SDPA, which gives none at all
            return ()

        weights: list[Tensor | None] = []
        for layer, window in zip(attentions, self._windows, strict=True):
            if layer is None:
                weights.append(None)
                continue

            num_nodes, num_slots = layer.shape[-2:]
            held, root = columns(window, num_slots - num_nodes)[row]
            weights.append(_text_weights(layer[row : row + 1], path, held, root, window))
        return tuple(weights)

    def outputs(self, name: str) -> tuple[Layers, ...] | None:
        """For each token the `hidden_states` or `attentions` of all layers; None unless the call asks for them."""
        if name not in self.wanted:
            return None
        steps = zip_longest(*(row[name] for row in self._rows))
        return (self._prompt[name], *(_stacked(step, _LAYER_STATES[name]) for step in steps))


def _text_weights(attention: Tensor, path: Sequence[int], columns: list[int], root: int, window: int | None) -> Tensor:
    """The last node's weights over the text, `[1, heads, 1, tokens]`, without holes and other branches.

    `columns` are those of the slots in front of the nodes, `root` is that of the first node.
    """
    slots = [slot for slot, column in enumerate(columns) if column >= 0]
    sources = [*slots, *(len(columns) + node for node in path)]
    targets = [*(columns[slot] for slot in slots), *range(root, root + len(path))]

    by_slot = attention[..., path[-1] : path[-1] + 1, :]
    weights = by_slot.new_zeros(*by_slot.shape[:-1], root + len(path))
    weights[..., targets] = by_slot[..., sources]
    return weights[..., -window:] if window else weights


def _stacked(rows: Sequence[Layers | None], axis: int) -> Layers:
    """The states of one token in every row, zeros in rows that had ended, side by side on an axis."""
    example = next(layers for layers in rows if layers is not None)
    zeros = [None if layer is None else torch.zeros_like(layer) for layer in example]
    by_layer = zip(*(layers or zeros for layers in rows), strict=True)
    return tuple(None if layer[0] is None else torch.cat(layer, dim=axis) for layer in by_layer)


def _noted(variable: ContextVar[tuple[Any, ...]], value: Any) -> AbstractContextManager[None]:
    return variable_set(variable, (*variable.get(), value))


@contextmanager
def collect_speculation() -> Iterator[list[GenerationStats]]:
    """Collect the statistics of every speculative call made inside the block, one entry a call, on this thread.

    An entry is there from the call's start, and counts while it runs. A call that fails leaves none.

    Example:

    ```python
    >>> with collect_speculation() as stats:
    ...     pass  # pipeline(...), or target.generate(..., assistant_model=drafter)
    >>> sum(stats, GenerationStats()).num_steps
    0

    ```
    """
    collected: list[GenerationStats] = []
    with _noted(_COLLECTORS, collected):
        yield collected


@contextmanager
def reported(stats: GenerationStats) -> Iterator[None]:
    """Give the statistics of the call inside to every open collector, and take them back if it fails."""
    collectors = _COLLECTORS.get()
    for collected in collectors:
        collected.append(stats)
    try:
        yield
    except BaseException:
        for collected in collectors:
            collected[:] = [each for each in collected if each is not stats]
        raise


def observe_steps(observer: Observer) -> AbstractContextManager[None]:
    """Show every step of the speculative calls inside, on this thread, to `observer`, which reads a draft at once.

    Example:

    ```python
    >>> kept = []
    >>> with observe_steps(lambda draft, paths: kept.append([path.num_accepted for path in paths])):
    ...     pass  # target.generate(..., assistant_model=drafter)

    ```
    """
    return _noted(OBSERVERS, observer)
