"""Who has the key, or asks this machine by its name, is let in, and each request leaves a line in the log."""

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.serve.conftest import NAME, answered, sent, until
from transformers_falcon_spec.serve.service import Front, Server

KEY = "s3cret"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def status_of(front: Front, path: str = "/v1/models", **headers: str) -> tuple[int, Any]:
    """The status and the body of the answer to a request with these headers."""
    told: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    async def ask() -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": path, "headers": raw}
        await front(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    return told[0]["status"], json.loads(told[1]["body"])


@pytest.mark.parametrize("given", [None, "", KEY, f"Bearer {KEY}x", "Bearer ", f"bearer {KEY}", "Bearer \xff"])
def test_without_the_key_nothing_but_the_health_is_told(given: str | None) -> None:
    front = Front(_app, "0.0.0.0", KEY)
    headers = {} if given is None else {"authorization": given}

    status, body = status_of(front, **headers)

    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in body["error"]["message"]
    assert status_of(front, "/health", **headers)[0] == 200


def test_with_the_key_a_request_is_let_in_under_any_name() -> None:
    front = Front(_app, "127.0.0.1", KEY)

    assert status_of(front, authorization=f"Bearer {KEY}", host="models.example")[0] == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.0.2.1", "[", "a b"]
)
def test_a_page_that_leads_its_name_to_this_machine_is_not_let_in(name: str) -> None:
    status, body = status_of(Front(_app, "127.0.0.1"), host=name)

    assert (status, body["error"]["code"]) == (403, "wrong_host")
    assert status_of(Front(_app, "0.0.0.0"), host=name)[0] == 200  # its names are not known


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", ""])
def test_this_machine_is_let_in_by_its_names(name: str) -> None:
    assert status_of(Front(_app, "localhost"), host=name)[0] == 200


def test_a_request_leaves_a_line_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": NAME, "prompt": [1, 205, 308], "max_tokens": 5}
    with caplog.at_level(logging.INFO, logger="transformers_falcon_spec.serve.service"):
        answered(server, "/v1/completions", body)
        connection, answer = sent(server, "/v1/completions", {**body, "stream": True})
        answer.read()
        connection.close()
        answered(server, "/v1/completions", {**body, "n": 3})
        answered(server, "/a%0Ab")
        until(lambda: len(caplog.records) == 4)

    lines = [record.getMessage() for record in caplog.records]
    for line in lines[:2]:
        assert line.startswith("POST /v1/completions 200, ")
        assert line.endswith(" s, 3 tokens read, 5 written")
    assert lines[2].startswith("POST /v1/completions 400, ")
    assert lines[2].endswith(" s, 0 tokens read, 0 written")
    assert lines[3].startswith(r"GET /a\nb 404, ")
