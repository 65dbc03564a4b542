"""Texts of the engine are those of calls of their own, whoever shares the batch, leaves, or fails."""

import gc
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.tiny import make_target
from transformers_falcon_spec import GenerationStats, LookaheadDrafter
from transformers_falcon_spec.errors import RequestError
from transformers_falcon_spec.serve import engine as engine_module
from transformers_falcon_spec.serve.engine import Engine, Sampling, TextRequest, Ticket, Written

Pair = tuple[Any, Any, Any]
QUESTIONS = [
    "What is 3 plus 4?",
    "Write a poem.",
    "Tom has 3 boxes of 12 pencils. He gives 5 away. How many are left?",
]


class Gate:
    """Stands before `generate`: lets calls through when it is open, and notes how many rows each had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.has_come = threading.Event(), threading.Event()
        self.num_rows: list[int] = []
        self._generate = engine_module.timed_generate
        monkeypatch.setattr(engine_module, "timed_generate", self)

    def __call__(self, target: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_rows.append(len(ids))
        self.has_come.set()
        assert self.is_open.wait(60)
        return self._generate(target, ids, *args, **kwargs)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def engine(pair: Pair) -> Iterator[Engine]:
    engine = Engine(*pair, max_queue=3, max_batch=3, seeds=random.Random(0))
    yield engine
    engine.close()


class Asked:
    """A request that was submitted, and its events."""

    def __init__(self, engine: Engine, request: TextRequest) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pieces: list[str] = []
        self.ticket: Ticket = engine.submit(request, self.events.put)

    def last(self) -> Any:
        """Wait for the last event; pieces before it are kept."""
        while isinstance(event := self.events.get(timeout=60), str):
            self.pieces.append(event)
        return event


@pytest.fixture
def prompts(pair: Pair) -> list[tuple[int, ...]]:
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    encoded = pair[1].apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return [tuple(ids) for ids in encoded["input_ids"]]


def held(engine: Engine, gate: Gate, request: TextRequest) -> Asked:
    """A request that is being written and waits at the gate, so that others wait behind it."""
    asked = Asked(engine, request)
    assert gate.has_come.wait(60)
    return asked


def test_requests_that_wait_are_one_batch_and_have_the_texts_of_calls_of_their_own(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]], plain: Callable[..., str]
) -> None:
    first = held(engine, gate, TextRequest(prompts[0], 4))
    lengths = [3, 12, 16]
    asked = [Asked(engine, TextRequest(ids, num, is_streamed=True)) for ids, num in zip(prompts, lengths, strict=True)]
    gate.is_open.set()

    written = [each.last() for each in (first, *asked)]

    assert gate.num_rows == [1, 3]
    for each, num, request in zip(written, [4, *lengths], [first, *asked], strict=True):
        assert each.text == plain(list(request.ticket.request.prompt_ids), num)
        assert each.num_tokens <= num
        assert each.finish_reason == ("length" if each.num_tokens == num else "stop")
        assert each.speculation.num_steps + each.speculation.num_accepted + 1 == each.num_tokens
    assert min(each.speculation.num_accepted for each in written[2:]) > 0  # what is longer than three tokens
    assert ["".join(each.pieces) for each in asked] == [each.text for each in written[1:]]
    assert all(piece for each in asked for piece in each.pieces)


def test_a_short_text_of_a_batch_is_told_before_the_long_one_ends(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]]
) -> None:
    held(engine, gate, TextRequest(prompts[0], 4))
    order: list[int] = []
    done = threading.Event()

    def tell(event: Any) -> None:
        if isinstance(event, Written):
            order.append(event.num_tokens)
        elif order == [3]:  # a piece of the long text after the end of the short one
            done.set()

    engine.submit(TextRequest(prompts[2], 24, is_streamed=True), tell)
    engine.submit(TextRequest(prompts[1], 3), tell)
    gate.is_open.set()

    assert done.wait(60)


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel"])
def test_sampled_requests_with_the_same_options_share_a_batch_and_keep_the_texts_of_their_seeds(
    verifier: str, engine: Engine, gate: Gate, prompts: list[tuple[int, ...]], plain: Callable[..., str]
) -> None:
    warm, cool = Sampling(0.7, 0.9), Sampling(0.5)
    engine.drafter.generation_config.verifier = verifier
    held(engine, gate, TextRequest(prompts[0], 4))
    kinds = [(warm, 5), (cool, None), (warm, 6)]
    asked = [Asked(engine, TextRequest(ids, 16, *kind)) for ids, kind in zip(prompts, kinds, strict=True)]
    gate.is_open.set()
    texts = [each.last().text for each in asked]
    again = [Asked(engine, TextRequest(ids, 16, *kind)).last().text for ids, kind in zip(prompts, kinds, strict=True)]
    engine.drafter.generation_config.verifier = "token_matching"

    assert texts[::2] == again[::2]
    if verifier == "gumbel":  # whose seeded texts are not those of rows
        assert gate.num_rows == [1] * 7
        return
    assert gate.num_rows == [1, 2, 1, 1, 1, 1]
    alone = [
        plain(list(prompts[row]), 16, seed, temperature=0.7, top_p=0.9, top_k=0) for row, seed in ((0, 5), (2, 6))
    ]
    assert texts[::2] == alone


LIMIT = 64  # tokens, after which a target reads otherwise
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OF_LENGTHS = {
    "phi3": {
        "max_position_embeddings": 4 * LIMIT,
        "original_max_position_embeddings": LIMIT,
        "rope_parameters": LONGROPE,
    },
    "llama": {
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "llama4": {"floor_scale": LIMIT, "attn_scale": 1.0, "attn_temperature_tuning": True},
    "deepseek_v32_sparse": {"index_topk": LIMIT},
}


@pytest.mark.parametrize("num_long", [LIMIT - 10, LIMIT + 6])
@pytest.mark.parametrize("family", OF_LENGTHS)
def test_requests_whose_batch_would_pass_a_limit_of_the_target_have_the_texts_that_they_have_alone(
    num_long: int, family: str, pair: Pair, gate: Gate
) -> None:
    tokenizer = pair[1]
    target = make_target(family, **OF_LENGTHS[family])
    requests = [
        TextRequest((7, 8, 9), 20),
        TextRequest(tuple(range(10, 10 + num_long)), 4),
        TextRequest((12, 13), 20),
    ]
    alone = [target.generate(torch.tensor([each.prompt_ids]), max_new_tokens=each.max_tokens) for each in requests]
    new_ids = [ids[0, len(each.prompt_ids) :] for ids, each in zip(alone, requests, strict=True)]
    engine = Engine(target, tokenizer, LookaheadDrafter.from_target(target))
    held(engine, gate, TextRequest((7, 8, 9), 4))
    asked = [Asked(engine, each) for each in requests]
    gate.is_open.set()

    written = [each.last() for each in asked]
    engine.close()

    assert [each.text for each in written] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in new_ids]
    assert gate.num_rows == [1, 2, 1]  # the short ones fit


def test_stop_strings_end_a_row_of_a_batch(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]], plain: Callable[..., str]
) -> None:
    whole = plain(list(prompts[0]), 16)
    stop = whole[5:9]
    held(engine, gate, TextRequest(prompts[1], 4))
    stopped = Asked(engine, TextRequest(prompts[0], 16, stop=("never in it", stop), is_streamed=True))
    other = Asked(engine, TextRequest(prompts[2], 16))
    gate.is_open.set()

    written = stopped.last()

    assert (written.text, written.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert "".join(stopped.pieces) == written.text
    assert other.last().text == plain(list(prompts[2]), 16)


def test_a_request_that_is_left_ends_and_its_neighbours_go_on(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]], plain: Callable[..., str]
) -> None:
    held(engine, gate, TextRequest(prompts[1], 4))
    left = Asked(engine, TextRequest(prompts[2], 500))
    other = Asked(engine, TextRequest(prompts[0], 16))
    waiting = Asked(engine, TextRequest(prompts[0], 16))
    engine.cancel(waiting.ticket)
    gate.has_come.clear()
    gate.is_open.set()
    assert gate.has_come.wait(60)
    engine.cancel(left.ticket)

    ended = left.last()
    assert (ended.finish_reason, ended.num_tokens < 500) == ("cancelled", True)
    assert waiting.last() == Written("", "cancelled", 0, GenerationStats())
    assert other.last().text == plain(list(prompts[0]), 16)


def test_beyond_the_longest_queue_requests_are_refused_until_one_leaves(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]]
) -> None:
    request = TextRequest(prompts[0], 4)
    held(engine, gate, request)
    waiting = [Asked(engine, request) for _ in range(3)]
    with pytest.raises(RequestError, match="3 requests wait already") as refused:
        Asked(engine, request)
    engine.cancel(waiting[1].ticket)
    late = Asked(engine, request)
    gate.is_open.set()

    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert [each.last().finish_reason for each in (*waiting, late)] == ["length", "cancelled", "length", "length"]


def test_when_the_engine_closes_what_waits_is_refused_and_what_is_written_ends(
    pair: Pair, gate: Gate, prompts: list[tuple[int, ...]]
) -> None:
    engine = Engine(*pair)
    writing = held(engine, gate, TextRequest(prompts[2], 500))
    waiting = Asked(engine, TextRequest(prompts[0], 4))
    engine.drain()
    refused = waiting.last()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.is_open.set()
    closing.join(60)

    assert (refused.status, engine.is_open, closing.is_alive()) == (503, False, False)
    assert writing.last().num_tokens < 500
    with pytest.raises(RequestError, match="shutting down"):
        Asked(engine, TextRequest(prompts[0], 4))


def test_an_error_is_told_to_all_of_its_batch_and_the_next_request_is_served(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]], plain: Callable[..., str]
) -> None:
    held(engine, gate, TextRequest(prompts[0], 4))
    asked = [Asked(engine, TextRequest(ids, 4)) for ids in prompts[:2]]
    original = gate._generate

    def failing(target: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        if len(ids) > 1:
            raise RuntimeError("no way")
        return original(target, ids, *args, **kwargs)

    gate._generate = failing
    gate.is_open.set()

    assert [str(each.last()) for each in asked] == ["no way"] * 2
    assert Asked(engine, TextRequest(prompts[0], 4)).last().text == plain(list(prompts[0]), 4)


class FailsAfter(StoppingCriteria):
    """Raises once it was asked a number of times."""

    def __init__(self, num_calls: int, error: Exception) -> None:
        self.num_left, self.error = num_calls, error

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


def fail(gate: Gate, num_tokens: int, error: Exception) -> None:
    """Let calls fail after some tokens."""
    original = gate._generate

    def failing(target: Any, ids: Any, *args: Any, stopping_criteria: Any, **kwargs: Any) -> Any:
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, FailsAfter(num_tokens, error)])
        return original(target, ids, *args, stopping_criteria=stopping_criteria, **kwargs)

    gate._generate = failing


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: no memory"),
    ],
    ids=repr,
)
def test_a_text_without_enough_memory_for_itself_says_what_to_do(
    error: Exception, engine: Engine, gate: Gate, prompts: list[tuple[int, ...]]
) -> None:
    fail(gate, 2, error)
    gate.is_open.set()

    told = Asked(engine, TextRequest(prompts[0], 4)).last()

    assert (told.status, told.code) == (503, "out_of_memory")
    assert "start the server with a smaller `--max_batch`" in str(told)


def test_an_error_holds_no_frame_of_the_call_that_failed(
    engine: Engine, gate: Gate, prompts: list[tuple[int, ...]]
) -> None:
    """Frames hold caches, and those the memory that is missing."""
    fail(gate, 2, RuntimeError("no memory"))
    gate.is_open.set()

    error = Asked(engine, TextRequest(prompts[0], 4)).last()

    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_nothing_of_a_request_is_kept_once_it_is_answered(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    asked = Asked(engine, TextRequest(prompts[0], 4))
    asked.last()
    ticket, thread = weakref.ref(asked.ticket), engine._thread
    del asked
    while engine.num_writing:
        thread.join(0.01)
    gc.collect()

    assert ticket() is None
