"""What a call returns beside the text: `out.speculation`, and `collect_speculation` for calls without a dict."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

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
