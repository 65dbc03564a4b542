"""Requests to a real server that fails, delays and garbles: each is made again as often as is worth it, and then told."""

import threading
from typing import Any

import pytest

from tests.chat_server import Answer, chat_server, echo
from transformers_falcon_spec.errors import EndpointError, OptionError
from transformers_falcon_spec.training.answers import ChatEndpoint, Prompt, Reply
from transformers_falcon_spec.training.options import RegenerateOptions
from transformers_falcon_spec.training.row_encoding import UnusableRowError

QUESTION = [{"role": "user", "content": "what is two"}]
KEY = "sk-very-secret"


def endpoint(url: str, slept: list[float] | None = None, **options: Any) -> ChatEndpoint:
    """An endpoint that does not wait, but notes in `slept` how long it would."""
    slept = [] if slept is None else slept
    return ChatEndpoint(url, "tiny", sleep=slept.append, **options)


def ask(asked: ChatEndpoint) -> Reply | UnusableRowError:
    (reply,) = asked.answer([Prompt(QUESTION, "", [])], RegenerateOptions(max_new_tokens=5, temperature=0.5), seed=3)
    return reply


def test_an_answer_has_text_thought_and_whether_it_is_whole() -> None:
    answers: list[Answer] = [
        {"content": "Two."},
        {"content": "Two.", "reasoning_content": "One more."},
        {"content": None, "reasoning": "One mo", "finish_reason": "length"},
    ]
    with chat_server(lambda _: answers[len(server.requests) - 1]) as server:
        asked = endpoint(server.url)
        found = [ask(asked) for _ in answers]

    assert found == [Reply("Two.", True), Reply("Two.", True, "One more."), Reply("", False, "One mo")]
    assert server.requests[0] == {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ((503, "no workers"), "status 503, 'no workers'"),
        ((429, "slower"), "status 429"),
        ((200, "<html>"), "status 200, '<html>'"),
        ((200, '{"choices": []}'), "status 200"),
        ((200, '{"choices": [{"message": {"content": 3}}]}'), "status 200"),
        ((200, "[]"), "status 200"),
    ],
)
def test_what_may_get_better_is_asked_again_with_longer_and_longer_waits(bad: Answer, text: str) -> None:
    def heals(request: dict[str, Any]) -> Answer:
        return echo(request) if len(server.requests) % 4 == 0 else bad

    slept = list[float]()
    with chat_server(heals) as server:
        found = ask(endpoint(server.url, slept, num_tries=4))
        with pytest.raises(EndpointError, match="must answer requests") as caught:
            ask(endpoint(server.url, num_tries=3))

    assert found == Reply("WHAT IS TWO", True)
    assert slept == [1.0, 2.0, 4.0]
    assert text in str(caught.value)


def test_a_server_that_is_down_is_told_after_all_tries() -> None:
    with chat_server() as server:
        pass
    slept = list[float]()

    with pytest.raises(EndpointError, match=r"it does not: ConnectError"):
        ask(endpoint(server.url, slept, num_tries=3))

    assert slept == [1.0, 2.0]


def test_an_answer_that_does_not_come_in_time_is_asked_for_again() -> None:
    come = threading.Event()

    def slow_once(request: dict[str, Any]) -> Answer:
        if len(server.requests) == 1:
            come.wait(20)
        return echo(request)

    with chat_server(slow_once) as server:
        found = ask(endpoint(server.url, timeout_seconds=0.2))
        come.set()

    assert found == Reply("WHAT IS TWO", True)
    assert len(server.requests) == 2


def test_a_request_that_is_refused_has_no_answer_but_the_servers_words_and_is_not_made_again() -> None:
    with chat_server(lambda _: (400, "too long")) as server:
        found = ask(endpoint(server.url))

    assert isinstance(found, UnusableRowError)
    assert "status 400" in str(found)
    assert "too long" in str(found)
    assert len(server.requests) == 1


@pytest.mark.parametrize("ending", ["abort", "content_filter", "error", "tool_calls"])
def test_an_answer_that_the_server_broke_off_or_took_parts_of_is_none(ending: str) -> None:
    with chat_server(lambda _: {"content": "Let me", "finish_reason": ending}) as server:
        found = ask(endpoint(server.url))

    assert isinstance(found, UnusableRowError)
    assert f"ended it by '{ending}'" in str(found)


@pytest.mark.parametrize("status", [401, 404])
def test_what_cannot_get_better_is_not_asked_again(status: int) -> None:
    message = r"for the model `tiny`.*status 40.*Check address, model and the key in `OPENAI_API_KEY`"
    with chat_server(lambda _: (status, "no")) as server, pytest.raises(EndpointError, match=message):
        ask(endpoint(server.url))

    assert len(server.requests) == 1


def test_the_key_is_sent_and_never_shown() -> None:
    with chat_server(lambda _: (401, f"wrong key {KEY}")) as server:
        asked = endpoint(server.url, api_key=KEY)
        with pytest.raises(EndpointError) as caught:
            ask(asked)

    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "wrong key (key)" in str(caught.value)
    assert KEY not in f"{asked} {caught.value}"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="`endpoint` must begin with http"):
        endpoint(url)
