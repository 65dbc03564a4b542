"""`falcon-spec find` against a local server that lists models as the Hub does."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from transformers_falcon_spec.cli import main

TARGET = "people/target"


def entry(name: str, kind: str, downloads: int, base: str = TARGET, **more: Any) -> dict[str, Any]:
    """A model as the Hub lists it."""
    tags = [f"base_model:{base}", kind]
    return {"id": name, "modelId": name, "downloads": downloads, "tags": tags, "config": {"model_type": kind}, **more}


MODELS = [
    entry("someone/falcon", "falcon_spec", 12),
    entry("someone/eagle", "eagle_spec", 900),
    entry("someone/medusa", "medusa_spec", 900, config=None),
    entry("someone/fine-tuned", "llama", 5000),
    entry("z/foreign", "llama", 3, config={"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}),
    entry("z/blocks", "qwen3", 2, config={"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}),
    entry("z/blocks-2", "qwen3", 1, config={"model_type": "qwen3", "architectures": ["DFlash2DraftModel"]}),
    entry("someone/for-another", "falcon_spec", 7, base="people/other"),
]


class Handler(BaseHTTPRequestHandler):
    """`GET /api/models?filter=...`; anything else is not found."""

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        wanted = parse_qs(split.query).get("filter", [])
        found = [model for model in MODELS if set(wanted) <= set(model["tags"])]
        is_known = split.path == "/api/models"
        body = json.dumps(found if is_known else {"error": "Not here"}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


def test_drafters_of_a_target_come_with_method_and_downloads(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "--target", TARGET, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [list(row.values()) for row in found] == [
        ["someone/eagle", "Eagle", 900],
        ["someone/medusa", "Medusa", 900],
        ["someone/falcon", "Falcon", 12],
        ["z/foreign", "Eagle-3", 3],
        ["z/blocks", "DFlash", 2],
        ["z/blocks-2", "DFlash2", 1],
    ]


def test_requests_are_not_logged(hub: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        main(["find", "--target", TARGET])

    assert "HTTP Request" not in caplog.text


def test_the_table_shows_drafters_of_the_target_alone(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["find", "--target", TARGET])

    shown = capsys.readouterr().out
    assert "someone/falcon" in shown
    assert "fine-tuned" not in shown
    assert "for-another" not in shown


def test_a_target_without_drafters_says_so(hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find", "--target", "people/alone"]) == 0
    assert "No drafter on the Hub names `people/alone`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_offline", "address", "message"),
    [
        (True, "http://127.0.0.1:9", "needs the Hub at .*OfflineModeIsEnabled"),
        (False, "http://127.0.0.1:9", "needs the Hub at http://127.0.0.1:9, but it does not answer"),
        (False, "{hub}/nowhere", "/nowhere, but it does not answer: .*404"),
    ],
)
def test_without_the_hub_the_message_says_what_to_look_at(
    is_offline: bool, address: str, message: str, hub: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)  # between retries
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", address.format(hub=hub))

    assert main(["find", "--target", TARGET]) == 1

    error = capsys.readouterr().err
    assert error.startswith("HubError: ")
    assert re.search(message, " ".join(error.split()))
