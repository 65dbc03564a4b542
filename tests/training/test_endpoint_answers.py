"""Answers from a real server: the file is in the order of the rows, and nothing that was answered is lost."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from tests.chat_families import family_tokenizer
from tests.chat_server import Answer, chat_server, echo
from transformers_falcon_spec.errors import EndpointError, OptionError
from transformers_falcon_spec.training.answers import ChatEndpoint
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.options import RegenerateOptions
from transformers_falcon_spec.training.regenerate import regenerate

OPTIONS = RegenerateOptions(max_new_tokens=9, max_prompt_tokens=60)


def ask(url: str, rows: list[list[dict[str, str]]], output: Path, concurrency: int = 4, **others: Any) -> int:
    given = {"tokenizer": make_tokenizer(), "options": OPTIONS, "template_kwargs": {}, **others}
    endpoint = ChatEndpoint(
        url,
        "tiny",
        num_tries=2,
        sleep=lambda _: None,
        timeout_seconds=10.0,
        num_at_once=concurrency,
        template_kwargs=given["template_kwargs"],
    )
    return regenerate(endpoint, rows=rows, output=output, **given)


def dialogues(num_rows: int) -> list[list[dict[str, str]]]:
    """Rows of two questions and answers each; all questions differ."""
    rows = [first + second for first, second in zip(make_rows(num_rows), make_rows(num_rows, seed=1), strict=True)]
    return [
        [{**turn, "content": f"{turn['content']} {number}{n}"} for n, turn in enumerate(row)]
        for number, row in enumerate(rows)
    ]


def answered(rows: list[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
    """What `echo` makes of rows of questions and answers."""
    return [
        [
            {**row[n - 1], "role": "assistant", "content": row[n - 1]["content"].upper()} if n % 2 else turn
            for n, turn in enumerate(row)
        ]
        for row in rows
    ]


def messages(output: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in output.read_text(encoding="utf-8").splitlines()]


def kept(output: Path) -> list[dict[str, Any]]:
    """What a run recorded beside its file, without the last line where that was cut."""
    lines = output.with_name(f"{output.name}.progress").read_text(encoding="utf-8").split("\n")[1:-1]
    return [json.loads(line) for line in lines]


def test_every_answer_is_one_to_all_earlier_turns_and_the_file_is_in_order(tmp_path: Path) -> None:
    rows, output, first = dialogues(9), tmp_path / "deep" / "out.jsonl", threading.Event()

    def late_first(request: dict[str, Any]) -> Answer:
        if request["messages"] == rows[0][:1]:
            first.wait(20)  # so row 0 comes last
        elif request["messages"][0] == rows[8][0] and len(request["messages"]) == 3:
            first.set()
        return echo(request)

    with chat_server(late_first) as server:
        num_written = ask(server.url, rows, output)

    assert num_written == 9
    assert messages(output) == read_conversations(output).rows == answered(rows)
    asked = [request["messages"] for request in server.requests]
    assert sorted(map(str, asked)) == sorted(str(row[:end]) for row in answered(rows) for end in (1, 3))
    assert {request["max_tokens"] for request in server.requests} == {9}
    assert len({request["seed"] for request in server.requests}) == 18


def test_an_endpoint_answers_more_than_one_file(tmp_path: Path) -> None:
    rows, outputs = dialogues(2), [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]

    with chat_server() as server:
        endpoint = ChatEndpoint(server.url, "tiny")
        for output in outputs:
            regenerate(endpoint, make_tokenizer(), rows, output, OPTIONS)

    assert [messages(output) for output in outputs] == [answered(rows)] * 2


@pytest.mark.parametrize("concurrency", [1, 3, 120])
def test_no_more_requests_are_made_at_once_than_asked_for(tmp_path: Path, concurrency: int) -> None:
    together = threading.Barrier(concurrency)

    def wait_for_others(request: dict[str, Any]) -> Answer:
        together.wait(20)
        return echo(request)

    with chat_server(wait_for_others) as server:
        ask(server.url, make_rows(2 * concurrency), tmp_path / "out.jsonl", concurrency)

    assert server.most_at_once == concurrency


def test_a_server_that_goes_down_loses_nothing_and_the_same_call_goes_on(tmp_path: Path) -> None:
    rows, output = dialogues(30), tmp_path / "out.jsonl"
    told = pytest.raises(EndpointError, match=r"status 503.*what is answered is kept, and the same command goes on")
    with chat_server(lambda request: echo(request) if len(server.requests) <= 14 else (503, "gone")) as server, told:
        ask(server.url, rows, output, concurrency=1)
    num_kept = len(kept(output))
    with output.with_name("out.jsonl.progress").open("a") as file:  # a kill may come while a line is being written
        file.write('{"row": 20, "mess')
    with chat_server() as server:
        num_written = ask(server.url, rows, output)

    assert num_kept == 7
    assert num_written == 30
    assert messages(output) == answered(rows)
    assert len(server.requests) == 2 * 23


def test_a_refused_row_is_left_out_and_told_in_the_servers_words_and_asked_again_by_the_next_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, output = dialogues(5), tmp_path / "out.jsonl"
    with chat_server(
        lambda request: (400, "too long") if request["messages"][0] == rows[3][0] else echo(request)
    ) as server:
        assert ask(server.url, rows, output) == 4
    left_out = messages(output)
    with chat_server() as mended:
        assert ask(mended.url, rows, output) == 5

    assert "No answer: row 3: the server must take the prompt, but says status 400" in caplog.text
    assert "too long" in caplog.text
    assert "1 are left out by a prompt that the server refuses" in caplog.text
    assert left_out == answered(rows[:3] + rows[4:])
    assert messages(output) == answered(rows)
    assert all(request["messages"][0] == rows[3][0] for request in mended.requests)


def test_a_key_that_is_refused_ends_the_run_at_once(tmp_path: Path) -> None:
    with chat_server(lambda _: (401, "who are you")) as server, pytest.raises(EndpointError, match="who are you"):
        ask(server.url, dialogues(30), tmp_path / "out.jsonl", concurrency=2)

    assert len(server.requests) <= 4


def test_a_finished_file_is_left_as_it_is(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with chat_server() as server:
        ask(server.url, make_rows(3), output)
        before = output.read_bytes()
        ask(server.url, make_rows(3), output)

    assert len(server.requests) == 3
    assert output.read_bytes() == before


def test_cut_answers_end_their_row_and_cut_thoughts_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, output = dialogues(4), tmp_path / "out.jsonl"
    replies: list[Answer] = [
        {"content": "one two", "finish_reason": "length"},
        {"content": "<think>one", "finish_reason": "length"},
        {"content": "", "reasoning_content": "one", "finish_reason": "length"},
    ]

    def cut(request: dict[str, Any]) -> Answer:
        number = [row[0] for row in rows].index(request["messages"][0])
        return dict(replies[number]) if number < 3 else echo(request)

    with chat_server(cut) as server:
        num_written = ask(server.url, rows, output)
        again = ask(server.url, rows, output)

    assert num_written == again == 2
    assert messages(output) == [[rows[0][0], {"role": "assistant", "content": "one two"}], answered(rows)[3]]
    assert "1 are cut short by an answer that was cut at `max_new_tokens`" in caplog.text
    assert "2 are left out by a thought that was cut at `max_new_tokens`" in caplog.text
    assert len(server.requests) == 3 + 2


def test_thoughts_kept_apart_are_read_and_trained_and_not_sent_again(tmp_path: Path) -> None:
    rows, output = dialogues(2), tmp_path / "out.jsonl"
    with chat_server(lambda request: {**echo(request), "reasoning_content": "hm"}) as server:
        ask(
            server.url, rows, output, tokenizer=family_tokenizer("qwen3"),
            options=RegenerateOptions(), template_kwargs={"enable_thinking": True},
        )  # fmt: skip

    assert {request["max_tokens"] for request in server.requests} == {4096}
    assert all(request["chat_template_kwargs"] == {"enable_thinking": True} for request in server.requests)
    assert all(turn.keys() == {"role", "content"} for request in server.requests for turn in request["messages"])
    found = read_conversations(output).rows
    assert [[turn.get("reasoning_content") for turn in row] for row in found] == [[None, "hm"] * 2] * 2


def test_prompts_that_are_too_long_are_never_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [[{"role": "user", "content": "one " * 80}, {"role": "assistant", "content": "two"}], *make_rows(2)]
    with chat_server() as server:
        assert ask(server.url, rows, tmp_path / "out.jsonl") == 2

    assert len(server.requests) == 2
    assert "row 0: a prompt must have 1 to 60 tokens, but it has 163." in caplog.text
    assert "1 are left out by a prompt longer than `max_prompt_tokens`" in caplog.text


@pytest.mark.parametrize("said", ["", " \n", None])
def test_an_answer_of_no_use_is_counted_and_ends_its_conversation(
    tmp_path: Path, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    rows, output = dialogues(4), tmp_path / "out.jsonl"
    bad = [rows[1][:1], [*answered(rows)[2][:3]]]  # the first question of a row, the second of another

    with chat_server(lambda asked: {"content": said} if asked["messages"] in bad else echo(asked)) as server:
        assert ask(server.url, rows, output) == 3
        assert ask(server.url, rows, output) == 3

    whole = answered(rows)
    assert messages(output) == [whole[0], whole[2][:2], whole[3]]
    assert len(server.requests) == 7
    assert "1 are left out by an empty answer" in caplog.text
    assert "1 are cut short by an empty answer" in caplog.text


def test_a_row_with_half_a_character_is_never_sent_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[{"role": "user", "content": "nice \ud83d"}], *dialogues(3)]
    with chat_server() as server:
        assert ask(server.url, rows, tmp_path / "out.jsonl") == 3

    assert len(server.requests) == 6
    assert "row 0: a text must be of whole characters" in caplog.text


def test_other_rows_are_noticed(tmp_path: Path) -> None:
    with chat_server() as server:
        ask(server.url, dialogues(3), tmp_path / "out.jsonl")
        with pytest.raises(OptionError, match="must hold measurements under the same settings"):
            ask(server.url, dialogues(4)[1:], tmp_path / "out.jsonl")

    assert len(server.requests) == 6


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_was_answered(tmp_path: Path) -> None:
    rows, output, is_killed = dialogues(12), tmp_path / "out.jsonl", threading.Event()
    target, data = save_target(tmp_path / "target"), write_rows(tmp_path / "data.jsonl", rows)
    command = [sys.executable, "-m", "transformers_falcon_spec", "regenerate", "--target", str(target)]
    command += ["--data", str(data), "--output", str(output), "--concurrency", "2"]

    def hang(request: dict[str, Any]) -> Answer:
        if len(server.requests) > 9:
            is_killed.wait(60)
        return echo(request)

    with chat_server(hang) as server:
        process = subprocess.Popen([*command, "--endpoint", server.url], stderr=subprocess.DEVNULL)
        while len(server.requests) < 11:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.wait()
        is_killed.set()
    num_kept = len(kept(output))
    with chat_server() as server:
        subprocess.run([*command, "--endpoint", server.url], check=True, capture_output=True)

    assert num_kept == 4
    assert len(server.requests) == 2 * 8
    assert messages(output) == answered(rows)
