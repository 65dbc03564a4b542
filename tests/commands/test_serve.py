"""`falcon-spec serve`: what it refuses, and a server in a process of its own that a signal ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from transformers_falcon_spec import cli
from transformers_falcon_spec.commands.options import ServeCommand
from transformers_falcon_spec.errors import OptionError

ROOT = Path(__file__).parents[2]
PAIR = ["--target", "models/reference-target", "--drafter", "models/falcon-reference"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--chat_template_kwargs", "[1]"],
            "`--chat_template_kwargs` must be a JSON object such as '{\"enable_thinking\": false}', but it is '[1]'",
        ),
        (["--max_batch", "0"], "`max_batch` must be at least 1, but it is 0"),
        (["--max_queue", "0"], "`max_queue` must be at least 1, but it is 0"),
        (["--max_kept_tokens", "-1"], "`max_kept_tokens` must be at least 0, but it is -1"),
        (
            ["--max_kept_tokens", "9", "--drafter", "models/lookahead", "--port", "0"],
            "A `LookaheadDrafter` drafts no branch of repeated text",
        ),
        (["--api_key", ""], "`api_key`, or FALCON_SPEC_API_KEY, must be letters, digits and signs"),
        (["--api_key", "two words"], "but it is empty or holds others"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *PAIR, *options]) == 1
    assert said in capsys.readouterr().err


def test_the_key_is_that_of_the_environment_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"target": PAIR[1], "drafter": PAIR[3]}
    assert ServeCommand(**options).api_key is None

    monkeypatch.setenv("FALCON_SPEC_API_KEY", "of-all")

    assert ServeCommand(**options).api_key == "of-all"
    assert ServeCommand(**options, api_key="of-one").api_key == "of-one"
    monkeypatch.setenv("FALCON_SPEC_API_KEY", "")  # somebody meant a key
    with pytest.raises(OptionError, match="it is empty"):
        ServeCommand(**options)


def test_a_port_in_use_is_told_before_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ServeCommand, "load_target", lambda _: pytest.fail("models were loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert cli.main(["serve", *PAIR, "--port", str(port)]) == 1

    assert f"but 127.0.0.1:{port} cannot be taken: " in capsys.readouterr().err


@pytest.mark.slow  # a process that loads the pair
def test_a_server_with_a_key_answers_those_who_have_it_and_logs_each_request() -> None:
    command = [sys.executable, "-m", "transformers_falcon_spec", "serve", *PAIR, "--port", "0"]
    environment = {**os.environ, "FALCON_SPEC_API_KEY": "s3cret"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as server:
        url = server.stdout.readline().rpartition(" ")[2].strip()
        body = {"model": PAIR[1], "prompt": "The sum is", "max_tokens": 3}
        statuses = [_status(url, body), _status(url, body, "s3cret")]
        server.send_signal(signal.SIGTERM)
        logged = server.stderr.read()

    assert statuses == [401, 200]
    assert '"POST /v1/completions HTTP/1.1" 401' in logged
    assert '"POST /v1/completions HTTP/1.1" 200' in logged
    assert "s3cret" not in logged


@pytest.mark.slow  # a process that loads the pair
def test_a_signal_ends_the_server_after_the_text_that_it_writes() -> None:
    body = {"model": PAIR[1], "prompt": "A long story:", "max_tokens": 400, "temperature": 1.9, "seed": 1}
    command = [sys.executable, "-m", "transformers_falcon_spec", "serve", *PAIR, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().rpartition(" ")[2].strip()
        waiting: list[Any] = []
        with _asked(url, {**body, "stream": True}) as stream:
            first = stream.readline()  # it is being written
            thread = threading.Thread(target=lambda: waiting.append(_status(url, body)))
            thread.start()
            while json.load(urllib.request.urlopen(f"{url}/health"))["num_waiting"] == 0:
                pass
            server.send_signal(signal.SIGTERM)
            rest = stream.read().decode()
        thread.join(60)

        assert first.startswith(b"data: {")
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason": "length"' in rest
        assert waiting == [503]
        assert server.wait(60) == -signal.SIGTERM


def _asked(url: str, body: dict[str, Any], key: str = "none") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers))


def _status(*args: Any) -> int:
    try:
        return int(_asked(*args).status)
    except urllib.error.HTTPError as error:
        return error.code
