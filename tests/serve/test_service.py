"""A real server and the real client of OpenAI: texts, streams, counts, errors, and readers that leave."""

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.serve.conftest import ASKED, JSON, NAME, address_of, sent, until
from transformers_falcon_spec.serve.protocol import ChatBody
from transformers_falcon_spec.serve.service import Server, Service

Pair = tuple[Any, Any, Any]
BODY = {"model": NAME, "messages": ASKED, "max_tokens": 4}


def test_a_chat_is_answered_with_the_targets_own_text(
    client: openai.OpenAI, chat_ids: list[int], plain: Callable[..., str]
) -> None:
    answer = client.chat.completions.create(model=NAME, messages=ASKED, max_completion_tokens=16, temperature=0)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", plain(chat_ids, 16))
    usage, counts = answer.usage, answer.usage.speculation
    assert usage.prompt_tokens == len(chat_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 + counts["num_steps"] + counts["num_accepted"] == usage.completion_tokens
    assert counts["num_drafted"] >= counts["num_accepted"] > 0
    assert counts["acceptance_length"] == 1 + counts["num_accepted"] / counts["num_steps"]


def test_a_sampled_completion_is_that_of_its_seed(
    client: openai.OpenAI, pair: Pair, plain: Callable[..., str]
) -> None:
    options = {"temperature": 0.7, "top_p": 0.9}
    answers = [client.completions.create(model=NAME, prompt="The sum is", max_tokens=12, seed=3, **options)]
    ids = pair[1]("The sum is")["input_ids"]
    answers.append(client.completions.create(model=NAME, prompt=ids, max_tokens=12, seed=3, **options))

    expected = plain(ids, 12, 3, **options, top_k=0)
    assert [answer.choices[0].text for answer in answers] == [expected] * 2
    assert answers[0].choices[0].finish_reason == "length"
    assert all(answer.usage.speculation["num_accepted"] > 0 for answer in answers)


def test_a_streamed_chat_has_the_role_pieces_that_are_not_empty_a_reason_and_the_usage(
    client: openai.OpenAI, chat_ids: list[int], plain: Callable[..., str]
) -> None:
    usage = {"include_usage": True}
    stream = client.chat.completions.create(
        model=NAME, messages=ASKED, max_tokens=16, stream=True, stream_options=usage
    )

    *pieces, last, counted = stream

    contents = [chunk.choices[0].delta.content for chunk in pieces]
    assert "".join(contents) == plain(chat_ids, 16)
    assert all(contents)
    assert [chunk.choices[0].delta.role for chunk in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    assert last.choices[0].finish_reason in {"length", "stop"}
    assert (last.choices[0].delta.content, last.usage, counted.choices) == (None, None, [])
    assert counted.usage.completion_tokens <= 16
    assert counted.usage.speculation["num_accepted"] > 0


def test_a_streamed_completion_ends_before_its_stop_string(client: openai.OpenAI, plain: Callable[..., str]) -> None:
    ids = [1, 205, 308, 227]
    whole = plain(ids, 16)
    stop = whole[6:9]

    chunks = list(client.completions.create(model=NAME, prompt=ids, max_tokens=16, stop=[stop], stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert all(chunk.choices[0].text for chunk in chunks[:-1])
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_model_is_listed_and_healthy(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    _, answer = sent(server, "/health")
    assert (answer.status, json.load(answer)) == (200, {"status": "ok", "num_waiting": 0})


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "`models/reference-target`, the one that is served"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context of 1024 tokens"),
        ({"max_tokens": 0}, openai.BadRequestError, "`max_tokens`: Input should be greater than"),
        ({"temperature": -1}, openai.BadRequestError, "`temperature`"),
        ({"presence_penalty": 1}, openai.BadRequestError, "`presence_penalty` must be left out"),
        ({"extra_body": {"top_k": 5}}, openai.BadRequestError, "`top_k` must be left out"),
        (
            {"extra_body": {"chat_template_kwargs": {"fly": 1}}},
            openai.BadRequestError,
            "it does not read `fly`",
        ),
        ({"messages": []}, openai.BadRequestError, "`messages`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "'text'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_in_words(
    client: openai.OpenAI, changes: dict[str, Any], kind: type[openai.APIStatusError], said: str
) -> None:
    with pytest.raises(kind, match=r"Error code: 4\d\d") as refused:
        client.chat.completions.create(**{**BODY, **changes})

    assert said in refused.value.body["message"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([[]], "must hold tokens"),
        ([4096], "from 0 to 4095"),
        (["a", "b"], "List should have at most 1 item|valid string"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_read_is_refused(client: openai.OpenAI, prompt: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model=NAME, prompt=prompt)


def test_the_chat_template_gets_the_arguments_of_server_and_request(
    pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[1], "chat_template", "{{ messages[0].content }}{{ ' think' * depth }}{{ end }}")
    service = Service(server.engine, pair[1], NAME, {"depth": 1, "end": "!"})
    body = ChatBody(**BODY, chat_template_kwargs={"depth": 3})

    expected = "What is 3 plus 4? think think think!"
    assert service._chat_ids(body) == pair[1](expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "but it says: Roles must alternate"),
        (None, "no chat template"),
    ],
)
def test_what_the_chat_template_says_is_told(
    client: openai.OpenAI, pair: Pair, monkeypatch: pytest.MonkeyPatch, template: str | None, said: str
) -> None:
    monkeypatch.setattr(pair[1], "chat_template", template)

    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**BODY)


def test_neutral_and_unknown_fields_are_let_pass(client: openai.OpenAI) -> None:
    more = {"n": 1, "logprobs": False, "frequency_penalty": 0.0, "user": "me", "top_logprobs": None, "stop": None}

    answer = client.chat.completions.create(**BODY, **more, extra_body={"fly": "high"})

    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/x", {}, 404),
        ("/v1/models", {}, 405),
    ],
    ids=str,
)
def test_errors_of_the_protocol_have_its_form(server: Server, path: str, body: Any, status: int) -> None:
    _, answer = sent(server, path, body)

    assert answer.status == status
    assert set(json.load(answer)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_text_ends_when_its_reader_leaves(server: Server, client: openai.OpenAI, is_streamed: bool) -> None:
    engine = server.engine
    body = json.dumps({**BODY, "max_tokens": 900, "stream": is_streamed, "temperature": 1.9, "seed": 1}).encode()
    connection = http.client.HTTPConnection(address_of(server), timeout=60)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    until(lambda: any(ticket.request.max_tokens == 900 and ticket.text.token_ids for ticket in engine._writing))
    (ticket,) = engine._writing
    if is_streamed:
        connection.getresponse().read(10)
    connection.close()

    client.chat.completions.create(**BODY)

    assert ticket.finish_reason == "cancelled"
    assert len(ticket.text.token_ids) < 900


def test_a_full_queue_says_when_to_come_again(server: Server, client: openai.OpenAI) -> None:
    engine = server.engine
    stream = client.chat.completions.create(**{**BODY, "max_tokens": 900, "temperature": 1.9, "seed": 1}, stream=True)
    next(stream)
    threads = [threading.Thread(target=client.chat.completions.create, kwargs=BODY) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: engine.num_waiting == 2)

    with pytest.raises(openai.RateLimitError, match="2 requests wait already") as refused:
        client.chat.completions.create(**BODY)
    stream.close()
    for thread in threads:
        thread.join(60)

    assert refused.value.response.headers["retry-after"] == "1"
