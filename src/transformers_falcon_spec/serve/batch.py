"""Requests that are written together: what they ask for, which events they get, and how each ends by itself."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from transformers import StoppingCriteriaList

from ..core.stats import GenerationStats
from ..errors import GenerationError
from ..generation.output import collect_speculation
from ..generation.processors import RowCriteria
from .growing_text import GrowingText


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: a temperature of 0 is greedy, a `top_k` of 0 leaves all tokens in."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of `generate`."""
        return {"do_sample": True, **vars(self)} if self.temperature else {"do_sample": False}


@dataclass(frozen=True)
class TextRequest:
    """What a request asks for.

    Args:
        prompt_ids (`tuple[int, ...]`): Token ids of the prompt.
        max_tokens (`int`): Most new tokens.
        sampling (`Sampling`): How tokens are chosen.
        seed (`int`, *optional*): Of a sampled text. It gives the text of a call of `generate` with this seed.
        stop (`tuple[str, ...]`): Strings before which the text ends.
        is_streamed (`bool`): Tell pieces as they come, not only the end.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    is_streamed: bool = False

    @property
    def batch_key(self) -> Hashable:
        """Requests with the same key can be written together."""
        return self.sampling if self.sampling.temperature else "greedy"


@dataclass(frozen=True)
class Written:
    """The last event of a request: its text, why it ended, and what speculation did for it.

    `finish_reason` is `"stop"`, `"length"` or, if nobody waits for the text any more, `"cancelled"`. `num_tokens` are
    those written, an end-of-sequence token included.
    """

    text: str
    finish_reason: str
    num_tokens: int
    speculation: GenerationStats


Event: TypeAlias = str | Written | Exception  # a piece of text; or the last one


class Ticket:
    """One request on its way. `tell` is called with its events, on the engine's thread or on that of the caller.

    Args:
        request (`TextRequest`): What is asked for.
        tell (`Callable`): Gets the events.
        new_text (`Callable`): Makes the empty text, in which tokens become words.
        seed (`int`): From which the text is drawn, if it is.
        eos_token_ids (`frozenset[int]`): Tokens that end the text.
    """

    def __init__(
        self,
        request: TextRequest,
        tell: Callable[[Event], object],
        new_text: Callable[[], GrowingText],
        seed: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request, self.tell, self.seed = request, tell, seed
        self._new_text, self._eos_token_ids = new_text, eos_token_ids
        self.is_cancelled = False  # set on any thread, read by the one that writes
        self.is_told = False  # the last event
        self._pieces: list[str] = []  # those that were told
        self.begin()

    def begin(self) -> None:
        """Write from the first token on, maybe once more; the reader is not told again what he was told before."""
        self.text = self._new_text()
        self.finish_reason: str | None = None
        self._known = "".join(self._pieces)  # with which the text must go on

    def is_end(self, ids: Tensor) -> bool:
        """Take in the newest token of the row; returns whether its text ends with it."""
        token_id = int(ids[-1])
        piece = self.text.add(token_id)
        self.finish_reason = self._reason_after(token_id)
        if self.finish_reason is not None:
            piece += self.text.end()
        if self.request.is_streamed and not self.is_cancelled:
            self._tell_new(piece)
        return self.finish_reason is not None

    def _tell_new(self, piece: str) -> None:
        """Tell what of a piece is new to the reader."""
        num_known = min(len(piece), len(self._known))
        if piece[:num_known] != self._known[:num_known]:
            raise GenerationError(
                "A text that is written once more must begin as its reader knows it, but it does not. Ask again."
            )
        self._known = self._known[num_known:]
        new = piece[num_known:]
        if new:
            self._pieces.append(new)
            self.tell(new)

    def _reason_after(self, token_id: int) -> str | None:
        if self.is_cancelled:
            return "cancelled"
        if token_id in self._eos_token_ids or self.text.is_stopped:
            return "stop"
        return "length" if len(self.text.token_ids) >= self.request.max_tokens else None

    def end(self, last: GenerationStats | Exception) -> None:
        """Tell the last event, unless it was told: the text with what was counted, or an error."""
        if self.is_told:
            return
        self.is_told = True
        if isinstance(last, Exception):
            self.tell(last)
            return
        reason = self.finish_reason or (
            "cancelled" if self.is_cancelled else "stop"
        )  # a criterion of the target's own
        self.tell(Written(self.text.whole, reason, len(self.text.token_ids), last))


class Batch:
    """Requests that are written together. Each hears of its end once the step is counted that ended it."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.tickets = tickets
        self._counted: list[GenerationStats] = []
        self._ended: dict[int, int] = {}  # rows that have ended and not heard of it, with their steps counted by then

    def write(self, generate: Callable[[StoppingCriteriaList], Any]) -> None:
        """Call `generate` with the criteria that end each row, and tell everybody."""
        criteria = RowCriteria([partial(self._is_end, row) for row in range(len(self.tickets))])
        with collect_speculation() as self._counted:
            generate(StoppingCriteriaList([criteria]))
        for ticket, stats in zip(self.tickets, self._rows, strict=True):
            ticket.end(stats)

    def _is_end(self, row: int, ids: Tensor) -> bool:
        self._tell_ended()
        ticket = self.tickets[row]
        if ticket.finish_reason is None and ticket.is_end(ids):
            self._ended[row] = self._rows[row].num_steps
            if len(ticket.text.token_ids) == 1:  # by the prefill, which is no step
                ticket.end(self._rows[row])
        return ticket.finish_reason is not None

    def _tell_ended(self) -> None:
        for row, num_steps in [*self._ended.items()]:
            if self._rows[row].num_steps > num_steps:
                del self._ended[row]
                self.tickets[row].end(self._rows[row])

    @property
    def _rows(self) -> list[GenerationStats]:
        return self._counted[0].rows or self._counted
