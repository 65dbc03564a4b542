"""The queue of requests, and the thread that owns the models: it writes requests that fit together as one batch.

It knows nothing of HTTP. Every request that is submitted gets exactly one last event, whatever happens to it.
"""

import copy
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..core.stats import GenerationStats
from ..drafters.base import DrafterModel
from ..drafters.tree_drafting.repeated_text import TextStore, draft_from
from ..errors import RequestError
from ..generation.output import collect_speculation
from ..generation.processors import RowCriteria
from ..generation.sequence_batch import seeded_rows
from ..generation.text_limits import reads_rows_as_alone
from ..generation.timed import timed_generate
from ..generation.verifier import verifier_named
from .growing_text import GrowingText
from .token_bytes import TokenTexts

_LOG = logging.getLogger(__name__)
MOST_USERS = 64  # whose texts are kept
CLOSED = "The server is shutting down. Ask another one, or ask again later."


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
        keeps_special_tokens (`bool`): Whether they stand in the text, for a parser that looks for them.
        num_top (`int`, *optional*): How many of the likeliest tokens to tell beside each; None: no probabilities.
        user (`str`, *optional*): Whose text it is. Drafts look into former texts of the same user, if those are kept.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    is_streamed: bool = False
    keeps_special_tokens: bool = False
    num_top: int | None = None
    user: str | None = None

    @property
    def batch_key(self) -> Hashable:
        """Requests with the same key can be written together."""
        return (self.sampling if self.sampling.temperature else "greedy", self.num_top is None)


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the target found a token, before temperature and the like, and what it found likeliest."""

    token: str
    token_bytes: bytes | None  # None where its tokenizer does not tell them
    logprob: float
    top: tuple["TokenLogprob", ...] = ()  # the likeliest first


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
    logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if they are asked for


Event: TypeAlias = str | Written | Exception  # a piece of text; or the last one


class Ticket:
    """One request on its way. `tell` is called with its events, on the engine's thread or on that of the caller.

    Args:
        request (`TextRequest`): What is asked for.
        tell (`Callable`): Gets the events.
        seed (`int`): From which the text is drawn, if it is.
        tokenizer (`PreTrainedTokenizerBase`): Makes words of tokens, on the thread that writes.
        eos_token_ids (`frozenset[int]`): Tokens that end the text.
    """

    def __init__(
        self,
        request: TextRequest,
        tell: Callable[[Event], object],
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.tell = tell
        self.seed = seed
        self.is_cancelled = False  # set on any thread, read by the one that writes
        self.is_told = False  # the last event
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self.text = GrowingText(tokenizer, request.stop, not request.keeps_special_tokens)
        self.finish_reason: str | None = None
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def is_end(self, ids: Tensor) -> bool:
        """Take in the newest token of the row; returns whether its text ends with it."""
        token_id = int(ids[-1])
        piece = self.text.add(token_id)
        if self.is_cancelled:
            self.finish_reason = "cancelled"
        elif token_id in self._eos_token_ids or self.text.is_stopped:
            self.finish_reason = "stop"
        elif len(self.text.token_ids) >= self.request.max_tokens:
            self.finish_reason = "length"

        is_end = self.finish_reason is not None
        if self.request.is_streamed and not self.is_cancelled:
            piece += self.text.end() if is_end else ""
            if piece:
                self.tell(piece)

        return is_end

    def note_logprobs(self, logits: Sequence[Tensor]) -> None:
        """Take in the target's logits `[vocab]` of each token, or of more."""
        noted: list[TokenLogprob] = []
        texts = TokenTexts(self._tokenizer)
        for token_id, row in zip(self.text.token_ids, logits, strict=False):
            text_of = partial(texts.of, is_first=not noted)
            log_probs = row.log_softmax(-1)
            values, ids = log_probs.topk(self.request.num_top or 0)
            likeliest = zip(ids.tolist(), values.tolist(), strict=True)
            top = tuple(TokenLogprob(*text_of(each), logprob) for each, logprob in likeliest)
            noted.append(TokenLogprob(*text_of(token_id), float(log_probs[token_id]), top))
        self._logprobs = tuple(noted)

    def end(self, last: GenerationStats | Exception) -> None:
        """Tell the last event, unless it was told: the text with what was counted, or an error."""
        if self.is_told:
            return
        self.is_told = True
        if isinstance(last, Exception):
            self.tell(last)
            return

        by_target = "cancelled" if self.is_cancelled else "stop"  # a criterion of the target's own
        reason = self.finish_reason or by_target
        self.tell(Written(self.text.whole, reason, len(self.text.token_ids), last, self._logprobs))


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
            output = generate(StoppingCriteriaList([criteria]))
        for row, (ticket, stats) in enumerate(zip(self.tickets, self._rows, strict=True)):
            if ticket.request.num_top is not None:
                ticket.note_logprobs([logits[row] for logits in output.logits])
            ticket.end(stats)

    def _is_end(self, row: int, ids: Tensor) -> bool:
        for ended, num_steps in [*self._ended.items()]:
            if self._rows[ended].num_steps > num_steps:
                del self._ended[ended]
                self.tickets[ended].end(self._rows[ended])

        ticket = self.tickets[row]
        is_open = ticket.finish_reason is None
        if is_open and ticket.is_end(ids) and ticket.request.num_top is None:  # logits come when all rows have ended
            self._ended[row] = self._rows[row].num_steps
            if len(ticket.text.token_ids) == 1:  # by the prefill, which is no step
                ticket.end(self._rows[row])

        return ticket.finish_reason is not None

    @property
    def _rows(self) -> list[GenerationStats]:
        return self._counted[0].rows or self._counted


class Engine:
    """Writes texts with a target and its drafter, which no other thread may use meanwhile.

    Requests wait in a queue in the order in which they came. The first one is taken, with those behind it that can
    share a batch with it: greedy ones together, sampled ones with the same options. Each row draws from a seed of its
    own, so that the text of a seed is that of a call of its own. Where the drafter's verifier does not keep such
    texts, sampled requests with a seed are written alone. So are those that a limit of the target keeps apart.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, of which the engine's thread gets a copy.
        drafter (`DrafterModel`): The drafter.
        max_queue (`int`): Most requests that wait.
        max_batch (`int`): Most requests that are written together.
        max_kept_tokens (`int`): Most tokens of former texts that are kept for each user; 0 keeps none.
        seeds (`random.Random`, *optional*): Where the seeds of sampled requests without one come from.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DrafterModel,
        max_queue: int = 64,
        max_batch: int = 8,
        max_kept_tokens: int = 0,
        seeds: random.Random | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.max_queue = max_queue
        self.max_batch = max_batch
        self.max_kept_tokens = max_kept_tokens
        self._stores: dict[str, TextStore] = {}  # by user, the one that asked last is the last one
        self._tokenizer = copy.deepcopy(tokenizer)  # a tokenizer serves one thread
        self._seeds = seeds or random.Random()
        eos = target.generation_config.eos_token_id
        self._eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.end_tokens = [str(tokenizer.decode([token_id])) for token_id in self._eos_token_ids]
        self._pad_token_id = tokenizer.pad_token_id or 0
        self._waiting: deque[Ticket] = deque()
        self._writing: list[Ticket] = []
        self._is_closing = self._is_ended = False
        self._changed = threading.Condition()  # of the three above
        self._thread = threading.Thread(target=self._work, name="falcon-spec engine", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._is_closing

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def num_writing(self) -> int:
        """How many requests are being written."""
        return len(self._writing)

    def submit(self, request: TextRequest, tell: Callable[[Event], object]) -> Ticket:
        """Put a request into the queue; `tell` gets its events, and must return at once.

        Raises:
            [`RequestError`]: the queue is full, or the engine takes no more requests.
        """
        seed = self._seeds.getrandbits(62) if request.seed is None else request.seed
        ticket = Ticket(request, tell, seed, self._tokenizer, self._eos_token_ids)
        with self._changed:
            if not self.is_open:
                raise RequestError(CLOSED, 503, "shutting_down")
            if len(self._waiting) >= self.max_queue:
                raise RequestError(
                    f"{self.max_queue} requests wait already, which is the most. Ask again later.", 429, "queue_full"
                )

            self._waiting.append(ticket)
            self._changed.notify()

        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request that nobody waits for: at once if it waits, else with its next token. Others go on."""
        with self._changed:
            ticket.is_cancelled = True
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
        ticket.end(GenerationStats())

    def drain(self) -> None:
        """Take no more requests, and refuse those that wait; texts that are being written are written to their end."""
        with self._changed:
            self._is_closing = True
            refused = list(self._waiting)
            self._waiting.clear()
        for ticket in refused:
            ticket.end(RequestError(CLOSED, 503, "shutting_down"))

    def close(self) -> None:
        """End all texts with their next token, and the thread."""
        self.drain()
        with self._changed:
            self._is_ended = True
            for ticket in self._writing:
                ticket.is_cancelled = True
            self._changed.notify()

        self._thread.join()

    def _work(self) -> None:
        while self._take_batch():
            self._write(self._writing)
            self._writing = []  # nothing is kept of a request

    def _take_batch(self) -> bool:
        """Wait for requests, and take those that are written together; False when the engine ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ended)
            for ticket in [*self._waiting]:
                if len(self._writing) < self.max_batch and self._fits(ticket.request):
                    self._writing.append(ticket)
                    self._waiting.remove(ticket)
            return bool(self._writing)

    def _fits(self, request: TextRequest) -> bool:
        """Whether a request can be written together with those that were taken."""
        if not self._writing:
            return True

        taken = [ticket.request for ticket in self._writing]
        is_alone = not verifier_named(self.drafter.generation_config.verifier).keeps_seeded_text
        has_seed = any(each.sampling.temperature and each.seed is not None for each in (request, taken[0]))
        if request.batch_key != taken[0].batch_key or (is_alone and has_seed):
            return False

        lengths = [len(each.prompt_ids) for each in (request, *taken)]
        num_new = max(each.max_tokens for each in (request, *taken))
        return reads_rows_as_alone(self.target, min(lengths), max(lengths) + num_new)

    def _write(self, tickets: list[Ticket]) -> None:
        """Write the texts of a batch; whatever happens, each request hears of it and the next ones are served."""
        stores = [self._store_of(ticket.request.user) for ticket in tickets]
        try:
            with draft_from(stores if any(stores) else []):
                Batch(tickets).write(partial(self._generate, tickets))
        except Exception as caught:  # noqa: BLE001
            _LOG.exception("Nothing was written:")
            caught.__cause__ = caught.__context__ = None
            error = _told(caught.with_traceback(None))  # frames hold caches and scores
            for ticket in tickets:
                ticket.end(error)
            return

        for ticket, store in zip(tickets, stores, strict=True):
            if store is not None:
                store.add([*ticket.request.prompt_ids, *ticket.text.token_ids])

    def _store_of(self, user: str | None) -> TextStore | None:
        """The texts of a user; of many users those leave that have not asked for longest."""
        if user is None or not self.max_kept_tokens:
            return None
        store = self._stores.pop(user, None) or TextStore(self.max_kept_tokens)
        self._stores[user] = store
        if len(self._stores) > MOST_USERS:
            del self._stores[next(iter(self._stores))]
        return store

    def _generate(self, tickets: Sequence[Ticket], criteria: StoppingCriteriaList) -> Any:
        requests = [ticket.request for ticket in tickets]
        seeds = [ticket.seed for ticket in tickets]
        rows = [torch.tensor(request.prompt_ids) for request in requests]
        with seeded_rows(seeds):
            run = timed_generate(
                self.target,
                pad_sequence(rows, True, float(self._pad_token_id), "left"),
                max(request.max_tokens for request in requests),
                requests[0].sampling.options,
                seeds[0],
                self.drafter,
                pad_sequence([torch.ones_like(row) for row in rows], True, 0.0, "left"),
                pad_token_id=self._pad_token_id,
                stopping_criteria=criteria,
                output_logits=requests[0].num_top is not None,
            )
        return run.output


def _told(error: Exception) -> Exception:
    """The error that a request hears of."""
    is_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not is_of_memory and "DefaultCPUAllocator" not in str(error):
        return error

    return RequestError(
        "What is written together needs more memory than there is. Shorten the prompt, lower `max_tokens`, or start "
        "the server with a smaller `--max_batch`.",
        503,
        "out_of_memory",
    )
