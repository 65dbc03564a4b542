"""What the servers of the examples share: what a request may say, and the desk where requests wait for their turn."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from pair import Pair
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

Answer = dict[str, Any]


class Ask(BaseModel):
    """What a request may say."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    seed: int = Field(default=0, ge=0, lt=2**63)
    stream: bool = Field(default=False, description="Lines of JSON, each with a piece of the text; the last has all.")


class Left(StoppingCriteria):
    """Ends a text that nobody waits for any more."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """For each row, whether it ends here."""
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


class Desk:
    """Where requests wait: one thread writes all texts, one after the other."""

    def __init__(self, pair: Pair, max_waiting: int) -> None:
        self.pair, self.max_waiting = pair, max_waiting
        pair.answer("Hello.", 8)  # what the first call does once is done before anybody asks
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._unfinished: set[Future[Answer]] = set()

    async def reply(self, ask: Ask) -> Answer | StreamingResponse:
        """The answer when it is written, or as it is written."""
        refusal = self.pair.refusal(ask.prompt, ask.max_new_tokens)
        if refusal is not None:
            raise HTTPException(422, refusal)
        if len(self._unfinished) > self.max_waiting:  # the one that is being written waits no more
            raise HTTPException(503, f"{self.max_waiting} requests wait already. Ask again later.")
        if not ask.stream:
            return await asyncio.wrap_future(self._submit(ask))
        left = Left()
        streamer = TextIteratorStreamer(self.pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        work = self._submit(ask, streamer=streamer, stopping_criteria=StoppingCriteriaList([left]))
        work.add_done_callback(lambda _: streamer.text_queue.put(streamer.stop_signal))  # also where writing failed
        return StreamingResponse(_lines(streamer, work, left), media_type="application/x-ndjson")

    def _submit(self, ask: Ask, **options: Any) -> "Future[Answer]":
        work = self._writer.submit(self._write, ask, time.perf_counter(), **options)
        self._unfinished.add(work)
        work.add_done_callback(self._unfinished.discard)
        return work

    def _write(self, ask: Ask, asked: float, **options: Any) -> Answer:
        waited = time.perf_counter() - asked
        answer = self.pair.answer(ask.prompt, ask.max_new_tokens, ask.temperature, ask.seed, **options)
        return {**answer, "waited_seconds": waited}


def _lines(streamer: TextIteratorStreamer, work: "Future[Answer]", left: Left) -> Iterator[str]:
    try:
        for piece in streamer:
            yield json.dumps({"piece": piece}) + "\n"
        yield json.dumps(work.result()) + "\n"
    finally:
        left.event.set()  # whoever asked may have gone before the end


def ask_once(url: str, question: dict[str, Any]) -> Any:
    """The answer of a server, over HTTP."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
