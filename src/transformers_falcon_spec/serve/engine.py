"""The queue of requests, and the thread that owns the models: it takes requests that fit together as one batch.

It knows nothing of HTTP. Every request that is submitted gets exactly one last event, whatever happens to it.
"""

import copy
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..core.stats import GenerationStats
from ..drafters.base import DrafterModel
from ..errors import RequestError
from ..generation.sequence_batch import seeded_rows
from ..generation.timed import timed_generate
from ..generation.verifier import verifier_named
from .batch import Batch, Event, TextRequest, Ticket
from .growing_text import GrowingText

_LOG = logging.getLogger(__name__)
CLOSED = "The server is shutting down. Ask another one, or ask again later."


class Engine:
    """Writes texts with a target and its drafter, which no other thread may use meanwhile.

    Requests wait in a queue in the order in which they came. The first one is taken, with those behind it that can
    share a batch with it: greedy ones together, sampled ones with the same options. Each row draws from a seed of its
    own, so that the text of a seed is that of a call of its own. Where the drafter's verifier does not keep such
    texts, sampled requests with a seed are written alone.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, of which the engine's thread gets a copy.
        drafter (`DrafterModel`): The drafter.
        max_queue (`int`): Most requests that wait.
        max_batch (`int`): Most requests that are written together.
        seeds (`random.Random`, *optional*): Where the seeds of sampled requests without one come from.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DrafterModel,
        max_queue: int = 64,
        max_batch: int = 8,
        seeds: random.Random | None = None,
    ) -> None:
        self.target, self.drafter, self.max_queue, self.max_batch = target, drafter, max_queue, max_batch
        self._tokenizer = copy.deepcopy(tokenizer)  # a tokenizer serves one thread
        self._seeds = seeds or random.Random()
        eos = target.generation_config.eos_token_id
        self._eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        pads = [tokenizer.pad_token_id, *self._eos_token_ids, 0]
        self._pad_token_id = next(pad for pad in pads if pad is not None)
        self._waiting: deque[Ticket] = deque()
        self._writing: list[Ticket] = []
        self._is_open, self._is_ended = True, False
        self._changed = threading.Condition()  # of the four above
        self._thread = threading.Thread(target=self._work, name="falcon-spec engine", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._is_open and self._thread.is_alive()

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
        new_text = partial(GrowingText, self._tokenizer, request.stop)
        seed = self._seeds.getrandbits(62) if request.seed is None else request.seed
        ticket = Ticket(request, tell, new_text, seed, self._eos_token_ids)
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
            was_waiting = ticket in self._waiting
            if was_waiting:
                self._waiting.remove(ticket)
        if was_waiting:
            ticket.end(GenerationStats())

    def drain(self) -> None:
        """Take no more requests, and refuse those that wait; texts that are being written are written to their end."""
        with self._changed:
            self._is_open = False
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
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for requests and write a batch of them, of which nothing is kept; False when the engine ends."""
        batch = self._next_batch()
        self._write(batch)
        with self._changed:
            self._writing = []
        return bool(batch)

    def _next_batch(self) -> list[Ticket]:
        """Wait for requests, and take those that are written together; none when the engine ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ended)
            fitting = [ticket for ticket in self._waiting if self._fits(ticket.request, self._waiting[0].request)]
            self._writing = fitting[: self.max_batch]
            for ticket in self._writing:
                self._waiting.remove(ticket)
            return self._writing

    def _fits(self, request: TextRequest, first: TextRequest) -> bool:
        """Whether a request can be written together with the first one that waits."""
        is_alone = not verifier_named(self.drafter.generation_config.verifier).keeps_seeded_text
        has_seed = any(each.sampling.temperature and each.seed is not None for each in (request, first))
        return request is first or (request.batch_key == first.batch_key and not (is_alone and has_seed))

    def _write(self, tickets: list[Ticket]) -> None:
        """Write the texts of a batch; whatever happens, each request hears of it and the next ones are served.

        What fails as a batch, such as one that finds too little memory, is written one by one: no request fails for
        the sake of its neighbours.
        """
        error = self._error_of(tickets)
        left = [ticket for ticket in tickets if not ticket.is_told]
        if error is None or not left:
            return
        if len(tickets) == 1:
            left[0].end(_told(error, left[0].request))
            return

        _LOG.warning("%d requests are written one by one, as their batch failed: %s", len(left), error)
        for ticket in left:
            if ticket.is_cancelled:
                ticket.end(GenerationStats())
            else:
                ticket.begin()
                self._write([ticket])

    def _error_of(self, tickets: list[Ticket]) -> Exception | None:
        """Write the texts of a batch; returns what went wrong, without its frames, which hold caches and scores."""
        if not tickets:
            return None
        try:
            Batch(tickets).write(partial(self._generate, tickets))
        except Exception as error:  # noqa: BLE001
            _LOG.log(logging.ERROR if len(tickets) == 1 else logging.DEBUG, "Nothing was written:", exc_info=True)
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        return None

    def _generate(self, tickets: Sequence[Ticket], criteria: StoppingCriteriaList) -> None:
        requests = [ticket.request for ticket in tickets]
        seeds = [ticket.seed for ticket in tickets]
        rows = [torch.tensor(request.prompt_ids) for request in requests]
        with seeded_rows(seeds):
            timed_generate(
                self.target,
                pad_sequence(rows, True, float(self._pad_token_id), "left"),
                max(request.max_tokens for request in requests),
                requests[0].sampling.options,
                seeds[0],
                self.drafter,
                pad_sequence([torch.ones_like(row) for row in rows], True, 0.0, "left"),
                pad_token_id=self._pad_token_id,
                stopping_criteria=criteria,
            )


def _told(error: Exception, request: TextRequest) -> Exception:
    """The error that a request hears of."""
    is_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not is_of_memory and "DefaultCPUAllocator" not in str(error):
        return error
    return RequestError(
        f"This text needs more memory than there is: {len(request.prompt_ids)} tokens are to be read, and up to "
        f"{request.max_tokens} to be written. Shorten the prompt, or lower `max_tokens`.",
        503,
        "out_of_memory",
    )
