"""Prompts are read on a thread of its own, and what is wrong with a request is said in a sentence."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.conftest import NAME, answered
from transformers_falcon_spec.serve.service import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": NAME, "max_tokens": 2, "prompt": "The sum is"}
MIB = 2**20


def said(server: Server, body: Any, path: str = COMPLETIONS, **kwargs: Any) -> tuple[int, str]:
    """The status of an answer, and the sentence of its error."""
    status, answer = answered(server, path, body, **kwargs)
    return status, answer["error"]["message"] if "error" in answer else ""


class Tokenizer:
    """The pair's tokenizer, with another way to encode."""

    def __init__(self, tokenizer: Any, encode: Callable[..., Any]) -> None:
        self._tokenizer, self._encode = tokenizer, encode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._encode(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_while_a_prompt_is_tokenised_the_server_answers(
    server: Server, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def encode(*args: Any, **kwargs: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return pair[1](*args, **kwargs)

    monkeypatch.setattr(server.service, "tokenizer", Tokenizer(pair[1], encode))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(said(server, BODY)[0]))
    thread.start()
    assert has_begun.wait(60)

    health = answered(server, "/health")
    may_end.set()
    thread.join(60)

    assert (health[0], found) == (200, [200])


def test_a_list_of_ids_that_cannot_fit_is_refused(server: Server) -> None:
    status, sentence = said(server, {**BODY, "prompt": [1] * 1025})

    assert (status, "the prompt has 1025" in sentence) == (400, True)


SOUND = json.dumps(BODY).encode()


@pytest.mark.parametrize(
    "body",
    [
        SOUND.replace(b"sum", b"\xed\xa0\x80"),
        SOUND.replace(b"sum", b"\xff"),
        SOUND[:-1] + b', "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        SOUND[:-1] + b', "user": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
        SOUND[:-1] + b', "seed": ' + b"9" * 5_000 + b"}",
        SOUND[:20],
        b"",
    ],
    ids=lambda body: str(body[-20:]),
)
def test_a_body_that_is_no_sound_json_is_refused_in_a_sentence(body: bytes, server: Server) -> None:
    status, sentence = said(server, body)

    assert status == 400
    assert sentence


def test_a_body_that_is_not_named_json_is_refused_with_the_name_that_it_needs(server: Server) -> None:
    status, sentence = said(server, SOUND, headers={"content-type": "application/x-www-form-urlencoded"})

    assert (status, "of content-type application/json" in sentence) == (400, True)


@pytest.mark.parametrize(
    ("path", "changes", "part"),
    [
        (COMPLETIONS, {"prompt": None}, "`prompt.str`: Input should be a valid string"),
        (COMPLETIONS, {"prompt": [1.5] * 900}, "`prompt.list[int].0`: Input should be a valid integer"),
        (COMPLETIONS, {"stop": ["a"] * 5}, "at most 4 items"),
        (COMPLETIONS, {"prompt": "\ud800"}, "must be text in Unicode"),
        (COMPLETIONS, {"temperature": float("nan")}, "`temperature`"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "must be text in Unicode"),
        (CHAT, {"continue_final_message": True}, "`continue_final_message` must be left out"),
        (CHAT, {"add_generation_prompt": False}, "`add_generation_prompt` must be left out"),
        (CHAT, {"messages": [1] * 1_000}, "`messages.0`: Input should be a valid dictionary"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "`messages.0.content.list[Part].0`"),
        (CHAT, {"chat_template_kwargs": {f"n{number}": 1 for number in range(100)}}, "it does not read `n0`, `n1`, "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_is_told_once_and_shortly(path: str, changes: dict[str, Any], part: str, server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    status, sentence = said(server, {**BODY, "messages": messages, **changes}, path)

    assert status == 400
    assert part in sentence


def test_any_error_of_a_template_is_the_requests(
    server: Server, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[1], "chat_template", "{{ 1 // depth }}")
    body = {**BODY, "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"depth": 0}}

    assert said(server, body, CHAT) == (
        400,
        "The chat template must take these `messages`, but it says: integer division or modulo by zero",
    )
