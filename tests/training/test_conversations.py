"""Reading conversations: broken rows are named and left out, the others are read."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.chat import make_rows, write_rows
from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.training.conversations import read_conversations

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
GOOD_ROW = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OTHER = GOOD.replace('"b"', '"B"')
OTHER_ROW = [GOOD_ROW[0], {"role": "assistant", "content": "B"}]


def message(role: Any, content: Any = "a") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"messages": [', "the line must be JSON, but Expecting value"),
        ("not JSON", "the line must be JSON"),
        (b'{"messages": "\xff"}', "the line must be JSON, but 'utf-8' codec can't decode byte 0xff"),
        ("[]", "a row must be an object with a list `messages`"),
        ('{"text": "a"}', "a row must be an object with a list `messages`"),
        ('{"messages": []}', "a row must be an object with a list `messages`"),
        ('{"messages": ["a"]}', "each message needs a `role` of"),
        (json.dumps({"messages": [message("tool")]}), "a row must do without tools"),
        (json.dumps({"messages": [message("critic")]}), "each message needs a `role` of"),
        (json.dumps({"messages": [message(["user"])]}), "each message needs a `role` of"),
        (json.dumps({"messages": [message("user"), message("assistant", None)]}), "and a text `content`"),
        (json.dumps({"messages": [message("user")]}), "a row must have an assistant turn"),
        (
            json.dumps({"messages": [message("assistant"), message("user")]}),
            "the assistant must have something to answer",
        ),
    ],
)
def test_a_broken_line_is_named_and_harms_no_other(
    tmp_path: Path, line: str | bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.jsonl"
    broken = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([GOOD.encode(), b"", broken, OTHER.encode()]) + b"\n")

    with caplog.at_level(logging.WARNING):
        found = read_conversations(path)

    assert found.rows == [GOOD_ROW, OTHER_ROW]
    assert found.origins == [f"{path}, line 1", f"{path}, line 4"]
    (error,) = found.errors
    assert str(error).startswith(f"{path}, line 3: ")
    assert text in str(error)
    assert f"Left out: {error}" in caplog.text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([message("user"), message("tool"), message("assistant")], "tools"),
        ([message("user"), {**message("assistant"), "tool_calls": [{"id": 1}]}], "tools"),
        ([message("user"), message("critic")], "an unknown role"),
        ([message("user", [{"type": "image", "url": "x"}]), message("assistant")], "images or other parts"),
        ([message("user"), message("assistant", None)], "no text"),
        ([message("user")], "no assistant turn"),
        ([message("assistant")], "nothing before the first answer"),
        ([], "no messages"),
    ],
)
def test_rows_that_cannot_be_used_are_counted_by_reason_and_the_first_are_named(
    tmp_path: Path, row: list[Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD, *[json.dumps({"messages": row})] * 5, GOOD]), encoding="utf-8")

    found = read_conversations(path)

    assert found.rows == [GOOD_ROW]
    assert found.reasons == {reason: 5, "a copy of an earlier one": 1}
    assert sum(f"{path}, line" in record.getMessage() for record in caplog.records) == 3
    assert f"Left out: 5 rows in all: {reason}." in caplog.text


def test_questions_alone_are_read_where_they_will_be_answered(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [[message("user")], [message("system")], [*GOOD_ROW, message("user")]]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")

    found = read_conversations(path, needs_answers=False)

    assert found.rows == [rows[0], rows[2]]
    assert found.reasons == {"no assistant turn": 1}


def test_rows_with_tools_beside_their_messages_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n" + json.dumps({"messages": OTHER_ROW, "tools": [{"name": "add"}]}), encoding="utf-8")

    assert read_conversations(path).reasons == {"tools": 1}


def test_parts_that_are_all_text_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path.write_text(json.dumps({"messages": [message("user", parts), message("assistant", "c")]}), encoding="utf-8")

    assert read_conversations(path).rows == [[message("user", "ab"), message("assistant", "c")]]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_beside_the_text_is_kept_under_one_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.jsonl"
    answer = {**message("assistant", "b"), name: "hm"}
    path.write_text(json.dumps({"messages": [{**message("user"), name: "?"}, answer]}), encoding="utf-8")

    expected = [message("user"), {**message("assistant", "b"), "reasoning_content": "hm"}]
    assert read_conversations(path).rows == [expected]


def test_other_columns_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"source": "x", "messages": [{**each, "weight": 1} for each in GOOD_ROW]}))

    assert read_conversations(path).rows == [GOOD_ROW]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\r"])
def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "data.jsonl"
    row = [message("user", f"a{separator}b"), message("assistant", "c")]
    path.write_text(json.dumps({"messages": row}, ensure_ascii=False) + "\r\n" + GOOD, encoding="utf-8", newline="")

    found = read_conversations(path)

    assert found.rows == [row, GOOD_ROW]


def test_compressed_files_and_several_sources_are_read_in_order(tmp_path: Path) -> None:
    first, second = make_rows(3, seed=1), make_rows(2, seed=2)
    plain = write_rows(tmp_path / "a.jsonl", first)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(write_rows(tmp_path / "b.jsonl", second).read_bytes()))

    assert read_conversations([packed, str(plain)]).rows == second + first


@pytest.mark.parametrize("limit", [1, 3, 4, 9])
def test_the_limit_counts_good_rows(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "data.jsonl"
    good = [GOOD.replace('"b"', f'"{number}"') for number in range(4)]
    path.write_text("\n".join([good[0], "broken", good[1], good[0], *good[2:]]))

    assert len(read_conversations(path, limit).rows) == min(limit, 4)


def test_a_conversation_is_kept_once_and_the_others_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    again = json.dumps({"source": "x", **json.loads(GOOD)}, indent=None, separators=(",", ":"))  # the same messages
    two_turns = json.dumps({"messages": [*GOOD_ROW, *GOOD_ROW]})
    first.write_text("\n".join([GOOD, OTHER, GOOD]))
    second.write_text("\n".join([again, two_turns]))

    found = read_conversations([first, second])

    assert found.rows == [GOOD_ROW, OTHER_ROW, [*GOOD_ROW, *GOOD_ROW]]
    assert found.origins == [f"{first}, line 1", f"{first}, line 2", f"{second}, line 2"]
    assert found.duplicates == [f"{first}, line 3", f"{second}, line 1"]
    assert "Left out: 2 conversations that are the same as an earlier one" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"The data file `.*nowhere\.jsonl` does not exist"):
        read_conversations(tmp_path / "nowhere.jsonl")


def test_a_file_without_one_good_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("broken\nbroken\n")

    with pytest.raises(
        ConversationError, match=r"At least one usable conversation .* \(2 rows: 2 left out \(100%: 2 no JSON\)\)"
    ):
        read_conversations(path)


def test_a_packed_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 50)[:-12])

    with pytest.raises(ConversationError, match=r"The data file `.*data\.jsonl\.gz` must be readable to its end"):
        read_conversations(path)


@pytest.mark.parametrize(("suffix", "split"), [("", "train"), (":held_out", "held_out")])
def test_a_dataset_is_read_by_split(tmp_path: Path, suffix: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "chats"
    folder.mkdir()
    rows = {name: make_rows(2, seed=seed) for seed, name in enumerate(("train", "held_out"))}
    for name, part in rows.items():
        write_rows(folder / f"{name}.jsonl", part)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: held_out, path: held_out.jsonl}\n---\n"
    )

    assert read_conversations(f"{folder}{suffix}").rows == rows[split]


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"must be a \.jsonl or \.jsonl\.gz file or a dataset"):
        read_conversations(str(tmp_path / "nowhere"))
