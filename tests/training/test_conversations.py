"""Reading conversations: broken rows are named and left out, the others are read."""

import bz2
import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
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
        ('{"messages": [', "it must be JSON, but Expecting value"),
        ("not JSON", "it must be JSON"),
        (b'{"messages": "\xff"}', "it must be JSON, but Invalid \\escape"),
        ("[]", "a row must be an object with a list `messages`, but it is `list`"),
        ('{"title": "a"}', "a row must hold a list `messages` that is not empty, or columns such as `prompt` and"),
        ('{"messages": []}', "a row must hold a list `messages` that is not empty"),
        ('{"messages": "a"}', "a row must hold a list `messages` that is not empty"),
        ('{"messages": [1]}', "each message needs a `role`, one of"),
        (
            json.dumps({"messages": [message("user", "\ud83d"), message("assistant")]}),
            "a text must be of whole characters",
        ),
        (
            json.dumps({"messages": [message("user"), message("assistant", " ")]}),
            "message 2 of the assistant must say",
        ),
        (json.dumps({"chosen": [message("user")], "rejected": []}), "but it has ['chosen', 'rejected']"),
        (json.dumps({"messages": [message("tool")]}), "each message needs a `role`, one of"),
        (json.dumps({"messages": [message("critic")]}), "each message needs a `role`, one of"),
        (json.dumps({"messages": [message(["user"])]}), "each message needs a `role`, one of"),
        (
            json.dumps({"messages": [message("user"), message("assistant", None)]}),
            "each message needs a `content` that is text alone",
        ),
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
    assert found.reasons.total() == 1
    assert f"Left out: {path}, line 3: " in caplog.text
    assert text in caplog.text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([message("user"), message("tool"), message("assistant")], "an unknown role"),
        ([message("user"), {**message("assistant"), "tool_calls": [{"id": 1}]}], "tools"),
        ([message("user"), message("critic")], "an unknown role"),
        ([message("user", [{"type": "image", "url": "x"}]), message("assistant")], "no text"),
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
    assert sum(f"{path}, line" in record.getMessage() for record in caplog.records) == 3 + 1  # of each reason
    assert f"Left out: 5 rows: {reason}" in caplog.text


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
    assert found.reasons == {"a copy of an earlier one": 2}
    assert f"Left out: {second}, line 1: the same conversation was read before." in caplog.text


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

    with pytest.raises(ConversationError, match=r"`.*data\.jsonl\.gz` must be readable to its end"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("suffix", "split"),
    [("", "train"), (":held_out", "held_out"), (":default:held_out", "held_out"), (":default:", "train")],
)
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
    with pytest.raises(ConversationError, match=r"must be readable .*`NAME:CONFIGURATION:SPLIT`"):
        read_conversations(str(tmp_path / "nowhere"))


# The forms in which people keep conversations

TALK = [message("user", "Where is 8 mm?"), message("assistant", "Here.")]
LONG_TALK = [message("system", "Be brief."), message("user", "Hü?"), message("assistant", "Hott.")]
TALKS = [TALK, [*LONG_TALK, message("user", "Why?"), message("assistant", "007")]]
SHAREGPT_ROLES = {"user": "human", "assistant": "gpt", "system": "system"}


def as_sharegpt(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"from": SHAREGPT_ROLES[each["role"]], "value": each["content"]} for each in talk]


def speaking_of(material: str, question: str, answer: str, **others: str) -> tuple[Callable[..., Any], ...]:
    """A question about what the column `material` holds: the row of a talk, and the turns that it is read as."""

    def row(talk: list[dict[str, Any]]) -> dict[str, str]:
        asked, said = (each["content"] for each in single(talk))
        return {question: "Look.", material: asked, answer: said, **others}

    def turns(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked, said = single(talk)
        return [message("user", f"Look.\n\n{asked['content']}"), said]

    return row, turns


def without_system(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in talk if each["role"] != "system"]


def single(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first question and its answer."""
    return without_system(talk)[:2]


ROW_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # row, what it means
    "messages": (lambda talk: {"messages": talk}, list),
    "bare": (lambda talk: talk, list),
    "sharegpt": (lambda talk: {"conversations": as_sharegpt(talk)}, list),
    "openhermes": (
        lambda talk: {"conversations": as_sharegpt(without_system(talk)), "system_prompt": "Be brief."},
        lambda talk: [LONG_TALK[0], *without_system(talk)],
    ),
    "conversations": (lambda talk: {"conversations": talk}, list),
    "lmsys": (lambda talk: {"conversation": talk, "turn": 1}, list),
    "ultrachat of the Hub": (lambda talk: {"prompt": "x", "prompt_id": "1", "messages": talk}, list),
    "alpaca": (
        lambda talk: {"instruction": single(talk)[0]["content"], "input": "", "output": single(talk)[1]["content"]},
        single,
    ),
    "alpaca with input": speaking_of("input", "instruction", "output"),
    "dolly": speaking_of("context", "instruction", "response", category="closed_qa"),
    "question with context": speaking_of("context", "question", "answer"),
    "prompt": (lambda talk: {"prompt": single(talk)[0]["content"], "completion": single(talk)[1]["content"]}, single),
    "chats": (lambda talk: {"prompt": talk[:-1], "completion": talk[-1:]}, list),
    "parts": (
        lambda talk: {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk]},
        list,
    ),
    "no tools": (lambda talk: {"messages": talk, "tools": "[]"}, list),
    "developer": (
        lambda talk: {"messages": [{**m, "role": m["role"].replace("system", "developer")} for m in talk]},
        list,
    ),
}


@pytest.mark.parametrize("form", ROW_FORMS)
def test_every_form_of_a_row_gives_its_conversation(tmp_path: Path, form: str) -> None:
    write, meaning = ROW_FORMS[form]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(write(talk)) for talk in TALKS), encoding="utf-8")

    found = read_conversations(path)

    assert found.rows == [meaning(talk) for talk in TALKS]


def test_a_context_that_is_no_text_is_never_dropped_in_silence() -> None:
    row = {"question": "Who?", "context": {"title": ["a"]}, "answer": "I."}

    with pytest.raises(ConversationError, match="`question`, `context` are one turn and must be text, but `context`"):
        read_conversations([row])


def rows() -> list[dict[str, Any]]:
    return [{"id": f"n{number}", "messages": talk} for number, talk in enumerate(TALKS)]


def lines() -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())


def in_folder(path: Path, name: str, write: Callable[[Path], Any]) -> None:
    path.mkdir()
    write(path / name)


FILE_FORMS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(lines(), encoding="utf-8"),
    "A.JSONL": lambda path: path.write_text(lines(), encoding="utf-8"),
    "a.ndjson": lambda path: path.write_text(lines(), encoding="utf-8"),
    "bom.jsonl": lambda path: path.write_text(lines(), encoding="utf-8-sig"),
    "odd [name]*.jsonl": lambda path: path.write_text(lines(), encoding="utf-8"),
    "a.json": lambda path: path.write_text(json.dumps(rows(), indent=1), encoding="utf-8"),
    "line.json": lambda path: path.write_text(json.dumps(rows()), encoding="utf-8"),
    "array.jsonl": lambda path: path.write_text(json.dumps(rows(), indent=1), encoding="utf-8"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines().encode())),
    "A.JSONL.GZ": lambda path: path.write_bytes(gzip.compress(lines().encode())),
    "a.json.bz2": lambda path: path.write_bytes(bz2.compress(json.dumps(rows(), indent=1).encode())),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(rows()), path),
    "saved": lambda path: datasets.Dataset.from_list(rows()).save_to_disk(str(path)),
    "parquets": lambda path: in_folder(path, "train-0.parquet", FILE_FORMS["a.parquet"]),
    "folder": lambda path: in_folder(path, "train.jsonl", FILE_FORMS["a.jsonl"]),
    "c:d": lambda path: in_folder(path, "a.jsonl", FILE_FORMS["a.jsonl"]),
}


@pytest.mark.parametrize("name", FILE_FORMS)
def test_every_kind_of_file_and_folder_is_read_whole(tmp_path: Path, name: str) -> None:
    FILE_FORMS[name](tmp_path / name)

    found = read_conversations(str(tmp_path / name))

    assert found.rows == TALKS
    assert all(origin.startswith(str(tmp_path / name)) for origin in found.origins)


MEMORY_FORMS: dict[str, Callable[[], Any]] = {
    "a list": rows,
    "a tuple": lambda: tuple(rows()),
    "a data set": lambda: datasets.Dataset.from_list(rows()),
    **{
        f"in the format {name}": lambda name=name: datasets.Dataset.from_list(rows()).with_format(name)
        for name in ("torch", "numpy", "pandas")
    },
}


@pytest.mark.parametrize("name", MEMORY_FORMS)
def test_every_kind_of_data_in_memory_is_read_whole(name: str) -> None:
    found = read_conversations(MEMORY_FORMS[name]())

    assert found.rows == TALKS
    assert found.origins == ["row 0", "row 1"]


def test_several_data_sets_in_memory_are_read_in_order() -> None:
    first, second = (datasets.Dataset.from_list([row]) for row in rows())

    assert read_conversations([first, second]).rows == TALKS


def test_fields_of_a_table_of_text_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt,response\n007,NA\n1.50,null\n", encoding="utf-8")

    assert read_conversations(path).rows == [
        [message("user", "007"), message("assistant", "NA")],
        [message("user", "1.50"), message("assistant", "null")],
    ]


@pytest.mark.parametrize(
    ("name", "content", "message_part"),
    [
        ("plain.txt", "user: hi\n", "it ends in `.txt`"),
        ("utf16.jsonl", GOOD.encode("utf-16"), "it must be JSON"),
        ("not_packed.jsonl.gz", GOOD, "must be readable to its end"),
        ("cut.json", json.dumps([json.loads(GOOD)], indent=1)[:-5], "it must be JSON, but Expecting"),
        ("comma.jsonl", GOOD + ",\n" + OTHER + ",\n", "line 1: it must be JSON, but Extra data: line 1 column"),
        ("broken.parquet", b"PAR1 and no more", "must be readable to its end"),
        ("empty.csv", "", "it is empty"),
        ("empty.jsonl", "", "it is empty"),
    ],
)
def test_a_file_that_is_no_data_is_refused_in_a_sentence(
    tmp_path: Path, name: str, content: str | bytes, message_part: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ConversationError) as caught:
        read_conversations(path)

    assert message_part in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_folder_that_datasets_cannot_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    in_folder(tmp_path / "scripts", "scripts.py", lambda path: path.write_text("print(1)"))
    in_folder(tmp_path / "parts", "train.jsonl", FILE_FORMS["a.jsonl"])
    (tmp_path / "parts" / "test.jsonl").write_text(lines())

    with pytest.raises(ConversationError, match="Dataset scripts are no longer supported"):
        read_conversations(tmp_path / "scripts")
    with pytest.raises(ConversationError, match='Unknown split "dev"'):
        read_conversations(f"{tmp_path / 'parts'}:dev")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["", "gz", "bz2"])
def test_what_is_no_utf8_breaks_its_line_alone_and_a_byte_order_mark_none(tmp_path: Path, pack: Any) -> None:
    ending = {gzip.compress: ".gz", bz2.compress: ".bz2"}.get(pack, "")
    path = tmp_path / f"data.jsonl{ending}"
    path.write_bytes(
        pack(f"\ufeff{GOOD}\n".encode() + GOOD.replace('"b"', '"\xff"').encode("latin-1") + b"\n" + OTHER.encode())
    )

    found = read_conversations(path)

    assert found.rows == [GOOD_ROW, OTHER_ROW]
    assert found.reasons == {"no JSON": 1}


def test_no_error_holds_the_data() -> None:
    secret = "secret " * 40
    broken = [{"messages": [message("critic" + secret, secret)]}, {"messages": secret}, {secret: secret}, secret]

    with pytest.raises(ConversationError) as caught:
        read_conversations(broken * 500)

    assert len(str(caught.value)) < 1000
    assert str(caught.value).count("secret") < 4


def test_no_prompt_is_in_both_parts() -> None:
    answers = [[message("user", f"Question {n // 4}?"), message("assistant", f"Answer {n}.")] for n in range(80)]
    found = read_conversations(answers)

    rest, held_out = found.split([9, 50])

    assert [row[0]["content"] for row in held_out.rows] == ["Question 2?"] * 4 + ["Question 12?"] * 4
    assert not {row[0]["content"] for row in rest.rows} & {"Question 2?", "Question 12?"}
    assert len(rest.rows) == len(rest.origins) == 72


def test_data_of_one_prompt_are_held_out_by_rows(caplog: pytest.LogCaptureFixture) -> None:
    found = read_conversations([[message("user", "Go."), message("assistant", f"{n}")] for n in range(20)])

    rest, held_out = found.split([10])

    assert (len(rest.rows), len(held_out.rows)) == (19, 1)
    assert "Rows that are held out ask what rows of the training ask, too" in caplog.text
