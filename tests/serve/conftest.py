"""What tests of the server share: the embedded pair, what the target alone writes, a server, and a client that adds nothing."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[2] / "models"
NAME = "models/reference-target"
ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="package")
def pair() -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter."""
    from transformers_falcon_spec.commands.loading import load_drafter, load_target  # noqa: PLC0415  see tests/conftest.py

    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    return target, tokenizer, load_drafter(str(MODELS / "falcon-reference"), target, tokenizer)


@pytest.fixture(scope="package")
def plain(pair: tuple[Any, Any, Any]) -> Callable[..., str]:
    """The text of a call of `generate` for one prompt, without the drafter."""
    import torch  # noqa: PLC0415

    target, tokenizer, _ = pair

    @cache
    def text(prompt_ids: tuple[int, ...], max_new_tokens: int, seed: int, **options: Any) -> str:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt_ids])
        options = {"do_sample": True, **options} if options else {"do_sample": False}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True)

    return lambda ids, num, seed=0, **options: text(tuple(ids), num, seed, **options)


@pytest.fixture(scope="package")
def server(pair: tuple[Any, Any, Any]) -> Iterator[Any]:
    """A server of the embedded pair on a thread."""
    from transformers_falcon_spec.serve.engine import Engine  # noqa: PLC0415

    with running(Engine(*pair, max_queue=2), pair[1]) as server:
        yield server


@pytest.fixture(scope="package")
def client(server: Any) -> Iterator[Any]:
    """The real client, which asks once."""
    import openai  # noqa: PLC0415

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="package")
def chat_ids(pair: tuple[Any, Any, Any]) -> list[int]:
    """The question as the target's template puts it."""
    return pair[1].apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]


@contextmanager
def running(engine: Any, tokenizer: Any) -> Iterator[Any]:
    """A server of an engine on a thread."""
    from transformers_falcon_spec.serve.service import Server, Service  # noqa: PLC0415

    server = Server(Service(engine, tokenizer, NAME, {}), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def address_of(server: Any) -> str:
    """Host and port."""
    return server.url.removeprefix("http://")


def sent(
    server: Any, path: str, body: Any = None, headers: dict[str, str] = JSON
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A connection after a request, without any client's help, and its answer."""
    connection = http.client.HTTPConnection(address_of(server), timeout=60)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, None if body is None else text, headers)
    return connection, connection.getresponse()


def answered(*args: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    """The status and the body of the answer to a request, as `sent` sends it."""
    connection, answer = sent(*args, **kwargs)
    body = json.load(answer)
    connection.close()
    return answer.status, body


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
