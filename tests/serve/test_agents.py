"""What agents ask of a server, by a real one and the real client: tools, probabilities, several texts, what is kept of former ones."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from transformers.cli.serving.utils import parse_assistant_message

from tests.serve.conftest import ASKED, NAME, running, until
from transformers_falcon_spec import GenerationStats, SpeculationConfig
from transformers_falcon_spec.generation.output import reported
from transformers_falcon_spec.serve import engine as engine_module
from transformers_falcon_spec.serve.choice import Choice, reply_parser
from transformers_falcon_spec.serve.engine import Engine, Written
from transformers_falcon_spec.serve.protocol import ChatBody
from transformers_falcon_spec.serve.service import Server

Pair = tuple[Any, Any, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}: {{ call.function.arguments.a }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REPLIES = {
    "start_anchor": "<|assistant|>\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"},
    },
}
CALLS = [{"name": "add", "arguments": {"a": 3}}, {"name": "add", "arguments": {"a": 5}}]
REPLY = "<think>A sum.</think>I add." + "".join(f"\n<call>{json.dumps(call)}</call>" for call in CALLS)


@pytest.fixture
def says(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Let a target that knows tools write this text, token by token, without asking the model; returns its tokens."""
    tokenizer = pair[1]
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(tokenizer, "response_template", REPLIES, raising=False)

    def say(text: str) -> list[int]:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

        def scripted(_target: Any, prompt: Any, *_: Any, stopping_criteria: Any, **__: Any) -> Any:
            with reported(GenerationStats()):
                for end in range(len(ids)):
                    written = torch.cat([prompt, torch.tensor([ids[: end + 1]])], dim=1)
                    if stopping_criteria(written, None).all():
                        break
            return SimpleNamespace(output=None)

        monkeypatch.setattr(engine_module, "timed_generate", scripted)
        return ids

    return say


def chat(client: openai.OpenAI, **changes: Any) -> Any:
    """An answer to the question, with at most 16 tokens."""
    return client.chat.completions.create(**{"model": NAME, "messages": ASKED, "max_tokens": 16, **changes})


# Tools


def test_tool_calls_are_parsed_as_transformers_serve_parses_them(
    says: Callable[[str], list[int]], client: openai.OpenAI, pair: Pair
) -> None:
    target, tokenizer, _ = pair
    ids = says(REPLY)
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tools=TOOLS, return_dict=True)[
        "input_ids"
    ]
    content, thought, calls = parse_assistant_message(tokenizer, target, ids, prompt)

    answer = chat(client, tools=TOOLS, max_tokens=200)

    (choice,) = answer.choices
    assert answer.usage.prompt_tokens == len(prompt)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
    assert choice.message.reasoning_content == thought == "A sum."
    made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert made == [(call.name, call.arguments) for call in calls]
    assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in made] == CALLS
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_holds_the_same_message(says: Callable[[str], list[int]], client: openai.OpenAI) -> None:
    says(REPLY)
    whole = chat(client, tools=TOOLS, max_tokens=200).choices[0].message

    *pieces, last = chat(client, tools=TOOLS, max_tokens=200, stream=True)

    deltas = [piece.choices[0].delta for piece in pieces]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == whole.reasoning_content
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in whole.tool_calls]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert last.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("text", ["I add.<call>{'name': add}</call> Done.", 'I add.<call>{"name": "add", "argu'])
def test_a_call_that_cannot_be_read_is_words(
    text: str, is_streamed: bool, says: Callable[[str], list[int]], client: openai.OpenAI
) -> None:
    num_tokens = len(says(text)) - 1

    answer = chat(client, tools=TOOLS, max_tokens=num_tokens, stream=is_streamed)

    if is_streamed:
        chunks = [chunk.choices[0] for chunk in answer]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        reason = chunks[-1].finish_reason
    else:
        content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.choices[0].message.tool_calls is None
    assert reason == "length"
    assert content.startswith("I add.")
    assert content.endswith(text[-10:])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("text", ["I add.<call>{'name': add}</call> Done.", "I add.<call>{'name': add}</call>"])
def test_a_call_that_cannot_be_read_comes_without_the_token_that_ends_the_text(
    text: str, is_streamed: bool, says: Callable[[str], list[int]], client: openai.OpenAI
) -> None:
    says(text)

    answer = chat(client, tools=TOOLS, max_tokens=200, stream=is_streamed)

    if is_streamed:
        chunks = [chunk.choices[0] for chunk in answer]
        content, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (content, reason) == (text, "stop")


@pytest.mark.parametrize("num_letters", range(1, 12))
def test_nothing_of_a_call_that_cannot_be_read_is_lost_however_a_stream_is_cut(
    num_letters: int, says: Callable[[str], list[int]], pair: Pair
) -> None:
    says(REPLY)
    text = "I add.<call>{'name': add}</call> Done."
    parser = reply_parser(pair[1], pair[0], pair[1]("<|assistant|>\n")["input_ids"], TOOLS)
    choice = Choice(0, "call", is_chat=True, parser=parser)

    chunks = []
    for start in range(0, len(text), num_letters):
        chunks += choice.chunks(text[start : start + num_letters])
    chunks += choice.last_chunks(Written(text, "length", len(text), GenerationStats()))

    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text


def test_a_conversation_goes_on_with_what_tools_gave(
    says: Callable[[str], list[int]], server: Server, pair: Pair
) -> None:
    says("So it is 7.")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]

    body = ChatBody(model=NAME, messages=[*ASKED, *turns], tools=TOOLS)
    text = pair[1].decode(server.service._chat_ids(body))
    hidden = pair[1].decode(server.service._chat_ids(body.model_copy(update={"tool_choice": "none"})))

    assert text.endswith("<|assistant|>[add: 3]<|tool|>7<|assistant|>\n")
    assert '"name": "add"' in text
    assert '"name": "add"' not in hidden


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "`tool_choice` must be `auto` or `none`"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "`tool_choice` must be `auto` or `none`"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "`parallel_tool_calls` must be left out"),
        ({"tools": [1]}, "`tools.0`"),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "a JSON object in a string, but one cannot be read",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": 1}]}, "but one cannot be read"),
        ({"top_logprobs": 2}, "`logprobs` must be true where `top_logprobs` are asked for"),
        ({"logprobs": True, "top_logprobs": 21}, "`top_logprobs`"),
        ({"n": 0}, "`n`"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_in_words(
    changes: dict[str, Any], said: str, says: Callable[[str], list[int]], client: openai.OpenAI
) -> None:
    says("7")

    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **changes)

    assert said in refused.value.body["message"]


@pytest.mark.parametrize(
    ("template", "said"), [(None, "its chat template does not show them"), (TEMPLATE, "no `response_template`")]
)
def test_tools_of_a_target_that_takes_none_are_refused(
    template: str | None, said: str, client: openai.OpenAI, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template is not None:
        monkeypatch.setattr(pair[1], "chat_template", template)

    with pytest.raises(openai.BadRequestError, match=said):
        chat(client, tools=TOOLS)


# Probabilities


def log_probs(pair: Pair, prompt: list[int], text: list[int]) -> torch.Tensor:
    """What one forward of the target alone says of each token of a text."""
    with torch.no_grad():
        logits = pair[0](torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}])
def test_probabilities_are_those_that_the_target_gives_each_token(
    options: dict[str, Any], client: openai.OpenAI, pair: Pair, chat_ids: list[int]
) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, **options)
    without = chat(client, **options)

    (choice,) = answer.choices
    assert choice.message.content == without.choices[0].message.content
    found = choice.logprobs.content
    assert len(found) == answer.usage.completion_tokens
    assert "".join(each.token for each in found).startswith(choice.message.content)
    assert all(bytes(each.bytes).decode() == each.token for each in found)
    text = pair[1](choice.message.content, add_special_tokens=False)["input_ids"][:6]
    expected = log_probs(pair, chat_ids, text)
    for each, row, token in zip(found, expected, text, strict=False):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-3)
        values, ids = row.topk(3)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(values.tolist(), abs=1e-3)
        assert [top.token for top in each.top_logprobs] == [pair[1].decode([token]) for token in ids.tolist()]
    assert answer.usage.speculation["num_accepted"] > 0


def test_probabilities_of_a_stream_come_with_its_end(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, temperature=0, n=2).choices

    chunks = list(chat(client, logprobs=True, temperature=0, n=2, stream=True))

    ends = {chunk.choices[0].index: chunk.choices[0] for chunk in chunks if chunk.choices[0].finish_reason}
    for number in (0, 1):
        found = [(each.token, each.logprob) for each in ends[number].logprobs.content]
        expected = [(each.token, pytest.approx(each.logprob, abs=1e-3)) for each in whole[number].logprobs.content]
        assert found == expected
    assert all(each.top_logprobs == [] for each in whole[0].logprobs.content)


def test_probabilities_of_a_completion_have_its_form(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="The sum is", max_tokens=8, logprobs=2, temperature=0)

    (choice,) = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.completion_tokens
    assert [max(top, key=top.get) for top in found.top_logprobs] == found.tokens
    assert [found.token_logprobs[index] for index in range(3)] == [max(top.values()) for top in found.top_logprobs[:3]]
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(len(found.tokens))]


def test_offsets_count_a_character_of_several_tokens_once(client: openai.OpenAI) -> None:
    asked = "Liste à puces: é è ê"
    answer = client.completions.create(model=NAME, prompt=asked, max_tokens=8, logprobs=0, temperature=0)

    (choice,) = answer.choices
    found = choice.logprobs
    halves = [token for token in found.tokens if "\ufffd" in token]
    assert len(halves) == 2
    assert "\ufffd" not in choice.text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token in halves or choice.text.startswith(token, offset)


# Several texts


def test_several_texts_are_those_of_the_seeds_that_follow(
    client: openai.OpenAI, chat_ids: list[int], plain: Callable[..., str]
) -> None:
    options = {"temperature": 0.7, "top_p": 0.9}
    expected = [plain(chat_ids, 16, seed, **options, top_k=0) for seed in (3, 4)]

    answer = chat(client, n=2, seed=3, **options)
    chunks = list(chat(client, n=2, seed=3, stream=True, stream_options={"include_usage": True}, **options))

    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.metrics == {"speculative_decoding": None}  # as vLLM has it for several texts
    assert answer.usage.completion_tokens - 2 == sum(
        answer.usage.speculation[name] for name in ("num_steps", "num_accepted")
    )
    *pieces, counted = chunks
    for number in (0, 1):
        own = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == number]
        assert "".join(each.delta.content or "" for each in own) == expected[number]
        assert own[-1].finish_reason == answer.choices[number].finish_reason
    assert counted.usage.completion_tokens == answer.usage.completion_tokens


def test_more_texts_than_the_queue_takes_are_refused_and_none_is_left_behind(
    server: Server, client: openai.OpenAI
) -> None:
    engine = server.engine
    stream = chat(client, max_tokens=900, temperature=1.9, seed=1, stream=True)
    next(stream)
    waiting = threading.Thread(target=chat, args=[client])
    waiting.start()
    until(lambda: engine.num_waiting == 1)

    with pytest.raises(openai.RateLimitError, match="2 requests wait already"):
        chat(client, n=2)

    assert engine.num_waiting == 1
    stream.close()
    waiting.join(60)
    assert chat(client).choices[0].message.content
    assert engine.num_waiting == 0


def test_texts_that_never_fit_into_the_queue_are_refused_for_good(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"`n` must be at most 2, .* but it is 100"):
        chat(client, n=100)

    assert server.engine.num_waiting == 0


# Counts


@pytest.mark.parametrize("is_streamed", [False, True])
def test_acceptance_has_the_form_that_aiperf_reads_of_vllm(is_streamed: bool, client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}

    answer = chat(client, temperature=0, **options)
    if is_streamed:
        *others, answer = answer
        assert answer.choices == []
        assert not any(hasattr(chunk, "metrics") for chunk in others)

    found = answer.metrics["speculative_decoding"]
    counts = answer.usage.speculation
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"] == counts["num_steps"] > 0
    assert sum(num * steps for num, steps in enumerate(histogram)) == found["num_accepted_draft_tokens"] > 0
    assert found["num_accepted_draft_tokens"] == counts["num_accepted"] <= found["num_draft_tokens"]
    assert found["num_draft_tokens"] == counts["num_drafted"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert found["mean_acceptance_length"] == counts["acceptance_length"]
    assert found["draft_acceptance_rate"] == counts["num_accepted"] / counts["num_drafted"]


# Former texts


@contextmanager
def keeping(pair: Pair, max_kept_tokens: int) -> Iterator[tuple[Engine, openai.OpenAI]]:
    """A server that keeps former texts, and whose drafts are not tuned, so that the same request takes the same steps."""
    target, tokenizer, drafter = pair
    options = drafter.generation_config
    with ExitStack() as stack:
        stack.callback(partial(setattr, drafter, "generation_config", options))
        drafter.generation_config = SpeculationConfig(**{**options.own_options(), "tune": False})
        engine = Engine(target, tokenizer, drafter, max_kept_tokens=max_kept_tokens)
        server = stack.enter_context(running(engine, tokenizer))
        yield engine, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_former_texts_of_a_user_are_drafted_for_nobody_else(pair: Pair) -> None:
    def asked(client: openai.OpenAI, **who: Any) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": "Write a poem."}]
        answer = chat(client, messages=messages, max_tokens=48, temperature=1.5, seed=1, **who)
        return answer.choices[0].message.content, answer.usage.speculation

    with keeping(pair, 0) as (_, client):
        text, counts = asked(client, user="ann")
        assert asked(client, user="ann") == (text, counts)

    with keeping(pair, 5_000) as (engine, client):
        assert asked(client) == (text, counts)
        assert asked(client, user="ann") == (text, counts)  # what nobody asked is kept for nobody
        again = asked(client, user="ann")
        assert asked(client, user="bob") == (text, counts)
        assert asked(client, prompt_cache_key="bob")[1]["num_steps"] == again[1]["num_steps"]
        assert sorted(engine._stores) == ["ann", "bob"]

    assert again[0] == text
    assert again[1]["num_steps"] < counts["num_steps"] - 3


def test_what_is_kept_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MOST_USERS", 2)

    with keeping(pair, 40) as (engine, client):
        for user in ("ann", "bob", "ann", "cid"):
            chat(client, user=user)

    assert [*engine._stores] == ["ann", "cid"]
    assert all(0 < store.num_tokens <= 40 for store in engine._stores.values())
