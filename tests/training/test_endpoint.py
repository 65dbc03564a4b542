"""Requests to a real server that fails, delays and garbles: each is made again as often as is worth it, and then told."""

import threading
from typing import Any

import pytest

from tests.chat_server import Answer, chat_server, echo
from transformers_falcon_spec.errors import EndpointError, OptionError
from transformers_falcon_spec.training.answers import ChatEndpoint, RefusedRequestError, Reply, UnusableEndpointError

QUESTION = [{"role": "user", "content": "what is two"}]
KEY = "sk-very-secret"


def endpoint(url: str, slept: list[float] | None = None, **options: Any) -> ChatEndpoint:
    """An endpoint that does not wait, but notes in `slept` how long it would."""
    slept = [] if slept is None else slept
    return ChatEndpoint(url, "tiny", sleep=slept.append, **options)


def test_an_answer_has_text_thought_and_whether_it_is_whole() -> None:
    answers: list[Answer] = [
        {"content": "Two."},
        {"content": "Two.", "reasoning_content": "One more."},
        {"content": None, "reasoning": "One mo", "finish_reason": "length"},
    ]
    with chat_server(lambda _: answers[len(server.requests) - 1]) as server:
        asked = endpoint(server.url)
        found = [asked.ask(QUESTION, max_tokens=5, seed=3) for _ in answers]

    assert found == [Reply("Two.", True), Reply("Two.", True, "One more."), Reply("", False, "One mo")]
    assert server.requests[0] == {"model": "tiny", "messages": QUESTION, "max_tokens": 5, "seed": 3}


@pytest.mark.parametrize("suffix", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_an_address_may_be_given_in_each_usual_form(suffix: str) -> None:
    with chat_server() as server:
        found = endpoint(server.url.removesuffix("/v1") + suffix).ask(QUESTION)

    assert found == Reply("WHAT IS TWO", True)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ((503, "no workers"), "status 503, 'no workers'"),
        ((429, "slower"), "status 429"),
        ((200, "<html>"), "is no chat completion: status 200, '<html>'"),
        ((200, '{"choices": []}'), "is no chat completion"),
        ((200, '{"choices": [{"message": {"content": 3}}]}'), "is no chat completion"),
        ((200, '{"choices": [{"message": {"role": "assistant"}}]}'), "is no chat completion"),
        ((200, "[]"), "is no chat completion"),
    ],
)
def test_what_may_get_better_is_asked_again_with_longer_and_longer_waits(bad: Answer, text: str) -> None:
    def heals(request: dict[str, Any]) -> Answer:
        return echo(request) if len(server.requests) % 4 == 0 else bad

    slept = list[float]()
    with chat_server(heals) as server:
        found = endpoint(server.url, slept, num_tries=4).ask(QUESTION)
        with pytest.raises(EndpointError, match=r"must answer, but in 3 tries it did not: .*") as caught:
            endpoint(server.url, num_tries=3).ask(QUESTION)

    assert found == Reply("WHAT IS TWO", True)
    assert slept == [1.0, 2.0, 4.0]
    assert text in str(caught.value)


def test_a_server_that_is_down_is_told_after_all_tries() -> None:
    with chat_server() as server:
        pass
    slept = list[float]()

    with pytest.raises(EndpointError, match=r"in 3 tries it did not: ConnectError"):
        endpoint(server.url, slept, num_tries=3).ask(QUESTION)

    assert slept == [1.0, 2.0]


def test_an_answer_that_does_not_come_in_time_is_asked_for_again() -> None:
    come = threading.Event()

    def slow_once(request: dict[str, Any]) -> Answer:
        if len(server.requests) == 1:
            come.wait(20)
        return echo(request)

    with chat_server(slow_once) as server:
        found = endpoint(server.url, timeout_seconds=0.2).ask(QUESTION)
        come.set()

    assert found == Reply("WHAT IS TWO", True)
    assert len(server.requests) == 2


def test_a_server_may_say_how_long_to_wait() -> None:
    slept = list[float]()
    with chat_server(
        lambda request: echo(request) if len(server.requests) > 1 else (429, "", {"Retry-After": "7"})
    ) as server:
        endpoint(server.url, slept).ask(QUESTION)

    assert slept == [7.0]


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (400, RefusedRequestError, "refuses a request: status 400, 'too long'"),
        (401, UnusableEndpointError, "does not: status 401"),
        (404, UnusableEndpointError, r"for the model `tiny`.*Check address, model and the key in `OPENAI_API_KEY`"),
    ],
)
def test_what_cannot_get_better_is_not_asked_again(status: int, error: type[EndpointError], text: str) -> None:
    with chat_server(lambda _: (status, "too long")) as server, pytest.raises(error, match=text):
        endpoint(server.url).ask(QUESTION)

    assert len(server.requests) == 1


def test_the_key_is_sent_and_never_shown() -> None:
    with chat_server(lambda _: (401, f"wrong key {KEY}")) as server:
        asked = endpoint(server.url, api_key=KEY)
        with pytest.raises(UnusableEndpointError) as caught:
            asked.ask(QUESTION)

    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "wrong key (key)" in str(caught.value)
    assert KEY not in f"{asked} {caught.value}"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://here", f"http://me:{KEY}@here", "http://here:port", "http://"]
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(OptionError, match="`endpoint` must be an address such as") as caught:
        endpoint(url)

    assert KEY not in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_has_passed_is_refused(seconds: float) -> None:
    with pytest.raises(OptionError, match="`timeout_seconds` must be above 0, but it is"):
        endpoint("http://here", timeout_seconds=seconds)


def test_a_key_may_have_white_space_around_it_and_one_that_cannot_be_sent_is_not_shown() -> None:
    with chat_server() as server:
        endpoint(server.url, api_key=f" {KEY}\r\n").ask(QUESTION)
        with pytest.raises(OptionError, match="must be one line of plain characters, but it is not") as caught:
            endpoint(server.url, api_key=f"{KEY}\nmore")

    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(caught.value)
