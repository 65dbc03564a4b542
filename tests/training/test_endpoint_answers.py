"""Answers from a real server: the file is in the order of the rows, and nothing that was answered is lost."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from tests.chat_families import family_tokenizer
from tests.chat_server import Answer, chat_server, echo
from transformers_falcon_spec.errors import EndpointError, OptionError
from transformers_falcon_spec.training import regenerate as regenerate_file
from transformers_falcon_spec.training.answers import ChatEndpoint
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.options import RegenerateOptions
from transformers_falcon_spec.training.regenerate import MOST_FAILURES, regenerate

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


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_made_at_once_than_asked_for(tmp_path: Path, concurrency: int) -> None:
    together = threading.Barrier(concurrency)

    def wait_for_others(request: dict[str, Any]) -> Answer:
        together.wait(20)
        return echo(request)

    with chat_server(wait_for_others) as server:
        ask(server.url, make_rows(6), tmp_path / "out.jsonl", concurrency)

    assert server.most_at_once == concurrency


def test_a_server_that_goes_down_loses_nothing_and_the_same_call_goes_on(tmp_path: Path) -> None:
    rows, output = dialogues(30), tmp_path / "out.jsonl"
    told = pytest.raises(EndpointError, match=rf"{MOST_FAILURES} rows in a row got no answer: .*status 503.*goes on")
    with chat_server(lambda request: echo(request) if len(server.requests) <= 14 else (503, "gone")) as server, told:
        ask(server.url, rows, output, concurrency=1)
    kept = output.read_text(encoding="utf-8")
    with output.open("a", encoding="utf-8") as file:  # a kill may come while a line is being written
        file.write('{"row": 20, "mess')
    with chat_server() as server:
        num_written = ask(server.url, rows, output)

    assert len(kept.splitlines()) == 7
    assert num_written == 30
    assert messages(output) == answered(rows)
    assert len(server.requests) == 2 * 23


def test_a_row_that_fails_is_told_and_tried_again_by_the_next_call(tmp_path: Path) -> None:
    rows, output = dialogues(8), tmp_path / "out.jsonl"

    def garble(request: dict[str, Any]) -> Answer:
        return (200, "garbage") if request["messages"][0] == rows[3][0] else echo(request)

    told = pytest.raises(EndpointError, match=r"1 got none, the last one because: .*no chat completion.* 7 are kept")
    with chat_server(garble) as server, told:
        ask(server.url, rows, output)
    with chat_server() as server:
        assert ask(server.url, rows, output) == 8

    assert len(server.requests) == 2
    assert messages(output) == answered(rows)


def test_a_refused_row_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, output = dialogues(5), tmp_path / "out.jsonl"
    with chat_server(
        lambda request: (400, "too long") if request["messages"][0] == rows[3][0] else echo(request)
    ) as server:
        assert ask(server.url, rows, output) == 4

    assert "1 rows were refused: left out" in caplog.text
    assert messages(output) == answered(rows[:3] + rows[4:])


def test_a_key_that_is_refused_ends_the_run_at_once(tmp_path: Path) -> None:
    with chat_server(lambda _: (401, "who are you")) as server, pytest.raises(EndpointError, match="who are you"):
        ask(server.url, dialogues(30), tmp_path / "out.jsonl", concurrency=2)

    assert len(server.requests) <= 4


def test_what_is_answered_when_a_run_is_interrupted_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, output, is_interrupted = dialogues(9), tmp_path / "out.jsonl", threading.Event()

    def first_four(request: dict[str, Any]) -> Answer:
        if request["messages"][0] not in [row[0] for row in rows[:4]]:
            is_interrupted.wait(20)
        return echo(request)

    class Interrupted(SimpleQueue[Any]):
        def get(self, *_: Any, **__: Any) -> Any:
            while not output.exists() or len(output.read_text(encoding="utf-8").splitlines()) < 4:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with chat_server(first_four) as server:
        with monkeypatch.context() as patch:
            patch.setattr(regenerate_file, "SimpleQueue", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(server.url, rows, output)
        is_interrupted.set()
        assert sorted(map(str, messages(output))) == sorted(map(str, answered(rows[:4])))
        before = len(server.requests)
        ask(server.url, rows, output)

    assert messages(output) == answered(rows)
    assert before <= 8 + 4
    assert len(server.requests) - before <= 10 + 4  # those that were interrupted are counted when they end


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
    assert (
        f"Of 4 conversations 2 are in `{output}`; 1 are cut short (1 by an answer that was cut at `max_new_tokens`); "
        "2 are left out (2 by a thought that was cut at `max_new_tokens`); 3 of 8 turns have an answer."
    ) in caplog.text
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
    assert "row 0, turn 1: a prompt must have at most 60 tokens, but it has 163." in caplog.text
    assert "1 are left out (1 by a prompt longer than `max_prompt_tokens`)" in caplog.text


def test_no_request_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`concurrency` must be at least 1, but it is 0"):
        ask("http://localhost/v1", make_rows(1), tmp_path / "out.jsonl", concurrency=0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "an empty answer"),
        (" \n", "an empty answer"),
        (None, "an empty answer"),
        ("so \ud83d", "half a character"),
    ],
)
def test_an_answer_of_no_use_is_counted_and_ends_its_conversation(
    tmp_path: Path, said: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, output = dialogues(4), tmp_path / "out.jsonl"
    bad = [rows[1][:1], [*answered(rows)[2][:3]]]  # the first question of a row, the second of another

    with chat_server(lambda asked: {"content": said} if asked["messages"] in bad else echo(asked)) as server:
        assert ask(server.url, rows, output) == 3
        assert ask(server.url, rows, output) == 3

    whole = answered(rows)
    assert messages(output) == [whole[0], whole[2][:2], whole[3]]
    assert len(server.requests) == 7
    assert f"1 are cut short (1 by {reason}); 1 are left out (1 by {reason}); 5 of 8 turns" in caplog.text


def test_a_row_with_half_a_character_is_never_sent_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[{"role": "user", "content": "nice \ud83d"}], *dialogues(3)]
    with chat_server() as server:
        assert ask(server.url, rows, tmp_path / "out.jsonl") == 3

    assert len(server.requests) == 6
    assert "row 0, turn 1: what the user says must be whole characters" in caplog.text


def test_a_server_that_answers_in_endless_brackets_is_told(tmp_path: Path) -> None:
    with (
        chat_server(lambda _: (200, "[" * 200_000)) as server,
        pytest.raises(EndpointError, match="no chat completion"),
    ):
        ask(server.url, make_rows(1), tmp_path / "out.jsonl")


def test_other_rows_are_noticed(tmp_path: Path) -> None:
    with chat_server() as server:
        ask(server.url, dialogues(3), tmp_path / "out.jsonl")
        with pytest.raises(OptionError, match=r"was begun with {'rows': "):
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
    num_kept = len(output.read_text(encoding="utf-8").splitlines())
    with chat_server() as server:
        subprocess.run([*command, "--endpoint", server.url], check=True, capture_output=True)

    assert num_kept == 4
    assert len(server.requests) == 2 * 8
    assert messages(output) == answered(rows)
