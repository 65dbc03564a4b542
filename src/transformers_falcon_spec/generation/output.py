"""What a call returns beside the text: `out.speculation`, and `collect_speculation` for calls without a dict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.stats import GenerationStats

_COLLECTORS: ContextVar[tuple[list[GenerationStats], ...]] = ContextVar("collectors", default=())


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """A `GenerateDecoderOnlyOutput` that also says what speculation did.

    Args:
        speculation ([`GenerationStats`], *optional*): Counts, rates and seconds of the call.
    """

    speculation: GenerationStats | None = None


class LayerStates:
    """Hidden states and attentions of every committed token, in the form in which `generate` returns them.

    The first entry is the prompt's; each other one belongs to one token, as if it had been read alone.
    """

    def __init__(self, config: GenerationConfig, windows: Sequence[int | None]) -> None:
        """`windows` holds the sliding window of each layer, None where it sees everything."""
        is_dict = config.return_dict_in_generate
        self.hidden_states: tuple[Any, ...] | None = () if is_dict and config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if is_dict and config.output_attentions else None
        self._windows = windows

    def add_prompt(self, outputs: Any) -> None:
        """What the prefill gave."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add_path(self, outputs: Any, path: Sequence[int]) -> None:
        """What a tree forward gave for the nodes of a kept path, root first."""
        for place, node in enumerate(path):
            if self.hidden_states is not None:
                self.hidden_states += (tuple(layer[:, node : node + 1] for layer in outputs.hidden_states),)
            if self.attentions is not None:
                layers = zip(outputs.attentions, self._windows, strict=True)
                self.attentions += (tuple(_seen(layer, path[: place + 1], window) for layer, window in layers),)


def _seen(attention: Tensor | None, path: Sequence[int], window: int | None) -> Tensor | None:
    """The last node's weights over the text and its path, `[rows, heads, 1, slots]`, without the slots of other branches."""
    if attention is None:  # an attention that gives no weights
        return None
    nodes = attention.shape[-2]
    weights = attention[..., path[-1] : path[-1] + 1, :]
    num_cached = weights.shape[-1] - nodes
    slots = [*range(num_cached), *(num_cached + node for node in path)]
    return weights[..., slots[-window:] if window else slots]


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
