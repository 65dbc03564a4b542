"""The servers of the examples: the text of plain `generate` over real HTTP, one text at a time, and nothing written for nobody."""

import asyncio
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "reference-target"
QUESTION = "Tom has 3 boxes of 12 pencils. How many pencils does he have?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the embedded pair, in a process of its own."""
    models = ["--target", str(TARGET), "--drafter", str(ROOT / "models" / "falcon-reference")]
    command = [sys.executable, "examples/07_serve_fastapi.py", *models, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().removeprefix("Serving at ").strip()
        finally:
            server.terminate()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serving  # noqa: PLC0415  it lies beside the examples

    return serving


def asked(url: str, **question: Any) -> list[dict[str, Any]]:
    """The lines of an answer."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(question).encode(), headers)
    with urllib.request.urlopen(request, timeout=1200) as response:
        return [json.loads(line) for line in response]


def plain_text(num_tokens: int, **options: Any) -> str:
    """What the target alone writes."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = target.generate(**inputs, max_new_tokens=num_tokens, **options)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_served_text_is_the_targets_own(url: str) -> None:
    (answer,) = asked(url, prompt=QUESTION, max_new_tokens=48)

    assert answer["text"] == plain_text(48, do_sample=False)
    assert answer["acceptance_length"] > 1
    assert answer["num_steps"] < answer["num_tokens"]


def test_a_streamed_sample_is_the_targets_own_and_comes_in_pieces(url: str) -> None:
    *pieces, answer = asked(url, prompt=QUESTION, max_new_tokens=32, temperature=0.7, seed=5, stream=True)

    torch.manual_seed(5)
    assert answer["text"] == plain_text(32, do_sample=True, temperature=0.7, top_k=0)
    assert "".join(piece["piece"] for piece in pieces) == answer["text"]
    assert len([piece for piece in pieces if piece["piece"]]) > 2


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"prompt": "Hi", "max_new_tokens": 5000}, "context of 1024 tokens"),
        ({"prompt": "Hi", "max_tokens": 5}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_what_cannot_be_written_is_refused_in_words(url: str, question: dict[str, Any], said: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="422") as refused:
        asked(url, **question)

    assert said in refused.value.read().decode()


class Slow:
    """A pair that writes when it may, and notes how many write at once."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.num_writing = self.most_writing = 0
        self.written: list[str] = []

    def refusal(self, *_: Any) -> None:
        return None

    def answer(self, question: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        assert self.may_write.wait(60)
        self.num_writing -= 1
        self.written.append(question)
        return {"text": question}


def test_requests_wait_for_their_turn_and_too_many_are_told_to_come_again(serving: ModuleType) -> None:
    pair = Slow()
    desk = serving.Desk(pair, max_waiting=2)
    pair.may_write.clear()

    async def ask_many() -> list[Any]:
        replies = [asyncio.ensure_future(desk.reply(serving.Ask(prompt=str(number)))) for number in range(5)]
        await asyncio.wait(replies[3:])  # refused at once
        pair.may_write.set()
        return await asyncio.gather(*replies, return_exceptions=True)

    answers = asyncio.run(ask_many())

    assert [answer["text"] for answer in answers[:3]] == ["0", "1", "2"] == pair.written[1:]
    assert [answer.status_code for answer in answers[3:]] == [503, 503]
    assert pair.most_writing == 1


def test_a_text_ends_when_its_reader_leaves(serving: ModuleType) -> None:
    import pair as pairs  # noqa: PLC0415  beside `serving`

    target, tokenizer = pairs.tiny_target()
    target.generation_config.eos_token_id = None
    written: list[int] = []

    class Noted(pairs.Pair):
        def answer(self, *args: Any, **options: Any) -> dict[str, Any]:
            answer = super().answer(*args, **options)
            written.append(answer["num_tokens"])
            return answer

    desk = serving.Desk(Noted(target, tokenizer, pairs.FalconSpecDrafter.from_target(target).eval()), max_waiting=2)

    async def leave() -> None:
        reply = await desk.reply(serving.Ask(prompt="Hi", max_new_tokens=480, stream=True))
        async for _ in reply.body_iterator:
            break
        await reply.body_iterator.aclose()
        await desk.reply(serving.Ask(prompt="Next", max_new_tokens=4))

    asyncio.run(leave())

    _, left, after = written
    assert left < 480
    assert after == 4
