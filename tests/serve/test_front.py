"""Who has the key, or asks this machine by its name, is let in, and each request leaves a line in the log."""

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import NAME, answered, until
from transformers_falcon_spec.serve.service import Server, make_app

KEY = "s3cret"


def status_of(server: Server, at: str, key: str | None, path: str = "/v1/models", **headers: str) -> tuple[int, Any]:
    """The status and the body of the answer to a request with these headers."""
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = TestClient(make_app(server.service, at, key)).get(path, headers=raw)
    return answer.status_code, answer.text


@pytest.mark.parametrize("given", [None, "", KEY, f"Bearer {KEY}x", "Bearer ", "Bearer \xff"])
def test_without_the_key_nothing_but_the_health_is_told(given: str | None, server: Server) -> None:
    headers = {} if given is None else {"authorization": given}

    status, body = status_of(server, "0.0.0.0", KEY, **headers)

    assert (status, "invalid_api_key" in body) == (401, True)
    assert KEY not in body
    assert status_of(server, "0.0.0.0", KEY, "/health", **headers)[0] == 200


def test_with_the_key_a_request_is_let_in_under_any_name(server: Server) -> None:
    assert status_of(server, "127.0.0.1", KEY, authorization=f"Bearer {KEY}", host="models.example")[0] == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.0.2.1", "a b"])
def test_a_page_that_leads_its_name_to_this_machine_is_not_let_in(name: str, server: Server) -> None:
    assert status_of(server, "127.0.0.1", None, host=name)[0] == 400
    assert status_of(server, "0.0.0.0", None, host=name)[0] == 200  # its names are not known


@pytest.mark.parametrize("name", ["localhost", "localhost:8000", "127.0.0.1:8000"])
def test_this_machine_is_let_in_by_its_names(name: str, server: Server) -> None:
    assert status_of(server, "localhost", None, host=name)[0] == 200


def test_a_request_leaves_a_line_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("uvicorn.access")
    access.addHandler(caplog.handler)
    body = {"model": NAME, "prompt": [1, 205, 308], "max_tokens": 5}
    try:
        for path, more in (("/v1/completions", {}), ("/v1/completions", {"echo": True}), ("/a%0Ab", {})):
            answered(server, path, {**body, **more})
        until(lambda: len(caplog.records) == 3)
    finally:
        access.removeHandler(caplog.handler)

    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].endswith('"POST /v1/completions HTTP/1.1" 200')
    assert lines[1].endswith('"POST /v1/completions HTTP/1.1" 400')
    assert lines[2].endswith('"POST /a%0Ab HTTP/1.1" 404')
