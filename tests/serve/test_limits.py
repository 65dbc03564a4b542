"""A request is read within limits, on a thread of its own, and what is wrong with it is said in a sentence."""

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.conftest import NAME, address_of, answered, until
from transformers_falcon_spec.serve import service as service_module
from transformers_falcon_spec.serve.engine import Engine
from transformers_falcon_spec.serve.service import Server, Service

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


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_tokenised(
    path: str, server: Server, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def encode(text: str, **kwargs: Any) -> Any:
        lengths.append(len(text))
        return pair[1](text, **kwargs)

    monkeypatch.setattr(server.service, "tokenizer", Tokenizer(pair[1], encode))
    text = "The sum is 7. " * 250_000
    body = {**BODY, "prompt": text, "messages": [{"role": "user", "content": text}]}

    status, sentence = said(server, body, path)

    assert status == 400
    assert "context of 1024 tokens" in sentence
    assert "the first 65536 are more tokens than that" in sentence
    assert lengths == [65_536]


@pytest.mark.parametrize("text", ["The sum is 7. ", "aaaa", "東京", " " * 48])
def test_no_text_that_fits_is_refused_by_its_pieces(
    text: str, server: Server, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PIECE", 64)
    service, whole = server.service, text * (3_000 // len(text))
    num_ids = len(pair[1](whole)["input_ids"])
    monkeypatch.setattr(service, "context", num_ids)

    service._check_text(whole)

    assert num_ids > 50


def test_a_list_of_ids_that_cannot_fit_is_refused_before_its_items_are_looked_at(server: Server) -> None:
    status, sentence = said(server, {**BODY, "prompt": [-1] * 1025})

    assert (status, "the prompt has 1025" in sentence) == (400, True)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_above_the_limit_is_refused_however_it_comes(server: Server, is_chunked: bool) -> None:
    piece = b" " * MIB
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address_of(server).split(":"), timeout=60) as connection:
        if is_chunked:
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(9):
                connection.sendall(b"100000\r\n" + piece + b"\r\n")
        else:
            connection.sendall(head + b"content-length: 8388609\r\n\r\n")  # and nothing of it

        answer = http.client.HTTPResponse(connection)
        answer.begin()

        assert answer.status == 413
        assert b"must have at most 8 MiB" in answer.read()


def test_a_body_that_does_not_come_is_not_waited_for_without_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "BODY_SECONDS", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address_of(server).split(":"), timeout=60) as connection:
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
        answer = connection.recv(4096)

    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_come_does_not_keep_the_server_from_ending(pair: tuple[Any, Any, Any]) -> None:
    server = Server(Service(Engine(*pair), pair[1], NAME, {}), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address_of(server).split(":"), timeout=60) as connection:
        connection.sendall(head + b"content-length: 100\r\n\r\n{")
        until(lambda: bool(server.service._receiving))
        server.should_exit = True
        thread.join(20)
        answer = connection.recv(4096)

    assert not thread.is_alive()
    assert answer.startswith(b"HTTP/1.1 503 ")


SOUND = json.dumps(BODY).encode()


@pytest.mark.parametrize(
    "body",
    [
        SOUND.replace(b"sum", b"\\ud800"),
        SOUND.replace(b"sum", b"\xed\xa0\x80"),
        SOUND.replace(b"sum", b"\xff"),
        SOUND.replace(b"reference", b"\\udfff"),
        SOUND[:-1] + b', "stop": "\\ud800"}',
        SOUND[:-1] + b', "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        SOUND[:-1] + b', "user": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
        SOUND[:-1] + b', "seed": ' + b"9" * 5_000 + b"}",
        SOUND[:-1] + b', "temperature": NaN}',
        b"\xef\xbb\xbf" + SOUND,
        SOUND.decode().encode("utf-16"),
        SOUND.decode().encode("utf-32"),
        SOUND[:20],
        b"",
    ],
    ids=lambda body: str(body[-20:]),
)
def test_a_body_that_is_no_sound_json_is_refused_in_a_sentence(body: bytes, server: Server) -> None:
    status, sentence = said(server, body)

    assert status == 400
    assert sentence.startswith("The body must be JSON in UTF-8 without a byte order mark, but there is a fault: ")


@pytest.mark.parametrize(
    ("path", "changes", "part"),
    [
        (COMPLETIONS, {"prompt": None}, "`prompt` must be a text or a list of token ids, but it is null"),
        (COMPLETIONS, {"prompt": [1.5] * 900}, "`prompt` holds others"),
        (COMPLETIONS, {"prompt": [True]}, "`prompt` holds others"),
        (COMPLETIONS, {"stop": [1] * 500_000}, "`stop.list[str].0`: Input should be a valid string, but it is 1"),
        (COMPLETIONS, {"stop": ["a"] * 5}, "`stop` must hold at most 4 strings, but there are 5"),
        (COMPLETIONS, {"stop": "a" * 1_001}, "at most 1000 characters, but one has 1001"),
        (COMPLETIONS, {"tools": [[{}]] * 100_001}, "at most 200000 brackets, but it opens 200006"),
        (COMPLETIONS, {"temperature": 1e-320}, "`temperature` must be 0, or at least 1e-06"),
        (CHAT, {"messages": [1] * 500_000}, "`messages.0`: Input should be a valid dictionary"),
        (CHAT, {"messages": [{"role": "user"}] * 10_001}, "at most 10000 items"),
        (CHAT, {"messages": [{"role": "user", "content": [1] * 500_000}]}, "`messages.0.content.list[Part].0`"),
        (CHAT, {"chat_template_kwargs": {f"n{number}": 1 for number in range(5_000)}}, "but `n0`, `n1`, "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_is_told_once_and_shortly(path: str, changes: dict[str, Any], part: str, server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    status, sentence = said(server, {**BODY, "messages": messages, **changes}, path)

    assert status == 400
    assert part in sentence
    assert len(sentence) < 2_100


def test_limits_let_in_what_they_name(server: Server) -> None:
    stops = ["never" * 200, "b" * 1_000, "c", "d"]

    assert said(server, {**BODY, "stop": stops, "temperature": 1e-6})[0] == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_web_page_cannot_ask_with_a_form(kind: str | None, server: Server) -> None:
    status, sentence = said(server, SOUND, headers={} if kind is None else {"content-type": kind})

    assert (status, "must be `application/json`" in sentence) == (415, True)


def test_any_error_of_a_template_is_the_requests(
    server: Server, pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[1], "chat_template", "{{ 1 // depth }}")
    body = {**BODY, "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"depth": 0}}

    assert said(server, body, CHAT) == (
        400,
        "The chat template must take these `messages`, but it says: integer division or modulo by zero",
    )


def test_a_reader_who_leaves_before_the_body_has_come_is_no_error_of_the_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.INFO):
        with socket.create_connection(address_of(server).split(":"), timeout=60) as connection:
            connection.sendall(head + b"content-length: 100\r\n\r\n{")
        until(lambda: any("/v1/completions 400" in record.getMessage() for record in caplog.records))

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
