"""The outputs of a call besides its text: statistics, hidden states and attentions, and each step for observers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.stats import GenerationStats
from ..core.verification import AcceptedPath
from .drafting import Draft

Layers = tuple[Tensor | None, ...]  # one entry for each layer
_LAYER_STATES = {"hidden_states": -3, "attentions": 0}  # and their axis of rows; Gemma 3n's states have one before it
Observer = Callable[[Draft, Sequence[AcceptedPath]], None]  # given the draft of a step and each row's accepted path
_COLLECTORS: ContextVar[tuple[list[GenerationStats], ...]] = ContextVar("collectors", default=())
_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """A `GenerateDecoderOnlyOutput` that also says what speculation did.

    Args:
        speculation ([`GenerationStats`], *optional*): Counts, rates and seconds of the call.
    """

    speculation: GenerationStats | None = None


class LayerStates:
    """Hidden states and attentions of every committed token, in the form in which `generate` returns them.

    The first entry is the prompt's; each other one belongs to one token of each row, as if it had been read alone.
    Rows that ended earlier than others have zeros there.
    """

    def __init__(self, config: GenerationConfig, windows: Sequence[int | None], num_rows: int = 1) -> None:
        is_dict = config.return_dict_in_generate
        self._wanted = [name for name in _LAYER_STATES if is_dict and getattr(config, f"output_{name}")]
        self._prompt: dict[str, Any] = {}
        self._rows: list[dict[str, list[Layers]]] = [{name: [] for name in self._wanted} for _ in range(num_rows)]
        self._windows = windows  # of each layer; None where it sees everything

    def add_prompt(self, outputs: Any) -> None:
        """Keep the states of the prompt, which the prefill gave."""
        self._prompt = {name: getattr(outputs, name) for name in self._wanted}

    def add_paths(self, outputs: Any, paths: Sequence[Sequence[int]], positions: Tensor) -> None:
        """Keep the states of each row's accepted path; `positions` gives the position of each slot's token."""
        for row, path in enumerate(paths if self._wanted else ()):
            slots = positions[row].tolist()
            for end, node in enumerate(path, start=1):
                if "hidden_states" in self._wanted:
                    states = tuple(layer[..., row : row + 1, node : node + 1, :] for layer in outputs.hidden_states)
                    self._rows[row]["hidden_states"].append(states)
                if "attentions" in self._wanted:
                    layers = zip(outputs.attentions, self._windows, strict=True)
                    weights = tuple(
                        None if layer is None else _text_weights(layer[row : row + 1], path[:end], slots, window)
                        for layer, window in layers  # an attention that gives no weights gives None
                    )
                    self._rows[row]["attentions"].append(weights)

    def outputs(self, name: str) -> tuple[Layers, ...] | None:
        """For each token the `hidden_states` or `attentions` of all layers; None unless the call asks for them."""
        if name not in self._wanted:
            return None
        rows = [row[name] for row in self._rows]
        longest = max(rows, key=len)
        steps = [
            [row[step] if step < len(row) else tuple(map(_zeros_like, example)) for row in rows]
            for step, example in enumerate(longest)
        ]
        axis = _LAYER_STATES[name]
        written = (tuple(_stacked(layer, axis) for layer in zip(*step, strict=True)) for step in steps)
        return (self._prompt[name], *written)


def _text_weights(attention: Tensor, path: Sequence[int], positions: Sequence[int], window: int | None) -> Tensor:
    """The last node's weights over the text, `[1, heads, 1, tokens]`, without holes and other branches."""
    num_nodes, num_slots = attention.shape[-2:]
    start, positions = num_slots - num_nodes, positions[-num_slots:]  # a sliding layer has the newest slots
    slots = [slot for slot in range(start) if positions[slot] >= 0] + [start + node for node in path]
    by_slot = attention[..., path[-1] : path[-1] + 1, :]
    weights = by_slot.new_zeros(*by_slot.shape[:-1], positions[slots[-1]] + 1)
    weights[..., [positions[slot] for slot in slots]] = by_slot[..., slots]
    return weights[..., -window:] if window else weights


def _zeros_like(states: Tensor | None) -> Tensor | None:
    return None if states is None else torch.zeros_like(states)


def _stacked(rows: tuple[Tensor | None, ...], axis: int) -> Tensor | None:
    return None if rows[0] is None else torch.cat([states for states in rows if states is not None], dim=axis)


@contextmanager
def collect_speculation() -> Iterator[list[GenerationStats]]:
    """Collect the statistics of every speculative call made inside the block, one entry a call, on this thread.

    Example:

    ```python
    >>> with collect_speculation() as stats:
    ...     pass  # pipeline(...), or target.generate(..., assistant_model=drafter)
    >>> sum(stats, GenerationStats()).num_steps
    0

    ```
    """
    collected: list[GenerationStats] = []
    token = _COLLECTORS.set((*_COLLECTORS.get(), collected))
    try:
        yield collected
    finally:
        _COLLECTORS.reset(token)


def report(stats: GenerationStats) -> None:
    """Hand the statistics of a finished call to every open collector."""
    for collected in _COLLECTORS.get():
        collected.append(stats)


@contextmanager
def observe_steps(observer: Observer) -> Iterator[None]:
    """Show every step of the speculative calls inside, on this thread, to `observer`; drafts have `node_probs`.

    Example:

    ```python
    >>> kept = []
    >>> with observe_steps(lambda draft, paths: kept.append([path.num_accepted for path in paths])):
    ...     pass  # target.generate(..., assistant_model=drafter)

    ```
    """
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def is_observed() -> bool:
    """Whether an observer is shown the steps."""
    return bool(_OBSERVERS.get())


def show(draft: Draft, paths: Sequence[AcceptedPath]) -> None:
    """Show a step to every observer."""
    for observer in _OBSERVERS.get():
        observer(draft, paths)
