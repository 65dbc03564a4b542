"""Answers of the target: the same in batches as alone, and the same file after an interruption."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.chat import PLAIN_TEMPLATE, make_rows, make_tokenizer
from tests.chat_families import family_tokenizer
from tests.tiny import make_target
from tests.training.runs import SMALL
from transformers_falcon_spec.errors import ConversationError, OptionError
from transformers_falcon_spec.training.answers import Prompt, Reply, TargetAnswerer
from transformers_falcon_spec.training.chat_template import ChatTemplate
from transformers_falcon_spec.training.options import RegenerateOptions
from transformers_falcon_spec.training.regenerate import regenerate, with_length

pytestmark = pytest.mark.training

ENDS = [2, *range(6, 45)]  # so many ids end a text that most answers come to an end
QUICK = RegenerateOptions(max_new_tokens=8, max_prompt_tokens=60, batch_size=2)
GREEDY = RegenerateOptions(max_new_tokens=8, max_prompt_tokens=60, batch_size=3, temperature=0.0)


@pytest.fixture
def target() -> PreTrainedModel:
    model = make_target(**SMALL).double()
    model.generation_config.eos_token_id = ENDS
    return model


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def dialogues(num_rows: int) -> list[list[dict[str, str]]]:
    """Rows of two questions and answers each."""
    return [first + second for first, second in zip(make_rows(num_rows), make_rows(num_rows, seed=1), strict=True)]


def count_calls(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """Batch sizes of the calls of `generate`; the call `fail_at` is interrupted."""
    sizes: list[int] = []
    generate = target.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        sizes.append(len(kwargs["input_ids"]))
        if fail_at is not None and len(sizes) > fail_at:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(target, "generate", counted)
    return sizes


def test_every_assistant_turn_is_replaced_and_the_rest_kept(tmp_path: Path, target: PreTrainedModel) -> None:
    rows, path = make_rows(7), tmp_path / "out.jsonl"

    num_written = regenerate(target, make_tokenizer(), rows, path, QUICK)

    written = read(path)
    assert num_written == len(written) == 7
    assert sorted(line["row"] for line in written) == list(range(7))
    for line in written:
        question, answer = rows[line["row"]]
        assert line["messages"][0] == question
        assert line["messages"][1]["role"] == "assistant"
        assert line["messages"][1]["content"] != answer["content"]


def answer_alone(target: PreTrainedModel, messages: list[dict[str, str]]) -> tuple[str, bool]:
    """The greedy answer to one conversation, without a batch, and whether it came to an end."""
    tokenizer = make_tokenizer()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = target.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True), bool(set(ids.tolist()) & set(ENDS))


def test_each_answer_is_the_one_that_the_target_gives_alone_to_all_earlier_turns(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    rows, path = dialogues(8), tmp_path / "out.jsonl"

    regenerate(target, make_tokenizer(), rows, path, GREEDY)

    num_whole = 0
    for line in read(path):
        said: list[dict[str, str]] = []
        for question in rows[line["row"]][::2]:
            text, is_complete = answer_alone(target, [*said, question])
            said += [question, {"role": "assistant", "content": text}]
            if not is_complete:  # cut off by the limit: what follows would not be an answer to it
                break
        else:
            num_whole += 1
        assert line["messages"] == said
    assert 0 < num_whole < 8


@pytest.mark.parametrize(
    "family", ["gemma3", "lfm2", "gpt2"]
)  # sliding windows; states of all that was read; learned positions
@pytest.mark.parametrize("max_new_tokens", [2, 3, 11])
def test_the_answers_of_a_batch_end_where_the_target_ends_them(family: str, max_new_tokens: int) -> None:
    target, tokenizer = make_target(family).double(), make_tokenizer()
    target.generation_config.eos_token_id = ENDS
    prompts = [tokenizer(row[0]["content"])["input_ids"] for row in make_rows(9)]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")

    found = TargetAnswerer(target, ChatTemplate(tokenizer)).answer(
        [Prompt([], "", ids) for ids in prompts],
        RegenerateOptions(max_new_tokens=max_new_tokens, temperature=0.0),
        seed=0,
    )

    at_once = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[
        :, inputs["input_ids"].shape[1] :
    ]
    texts = tokenizer.batch_decode(at_once, skip_special_tokens=True)
    assert found == [
        Reply(text, bool(set(ids) & set(ENDS))) for text, ids in zip(texts, at_once.tolist(), strict=True)
    ]


@pytest.mark.parametrize("num_calls", [0, 1, 2, 3, 5])
def test_an_interrupted_run_goes_on_to_the_same_file(
    tmp_path: Path, target: PreTrainedModel, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, tokenizer = dialogues(7), make_tokenizer()
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    num_written = regenerate(target, tokenizer, rows, whole, QUICK)
    with monkeypatch.context() as patch:
        count_calls(target, patch, fail_at=num_calls)
        with pytest.raises(KeyboardInterrupt):
            regenerate(target, tokenizer, rows, path, QUICK)
    with path.with_name("out.jsonl.progress").open("a") as file:  # the kill may come while a batch is being written
        file.write('{"row": 5, "mess' + "a" * 5_000)

    num_resumed = regenerate(target, tokenizer, rows, path, QUICK)

    assert path.read_bytes() == whole.read_bytes()
    assert num_resumed == num_written


def test_a_finished_file_is_left_as_it_is(
    tmp_path: Path, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, path = make_rows(5), tmp_path / "out.jsonl"
    num_written = regenerate(target, make_tokenizer(), rows, path, QUICK)
    before = path.read_bytes()
    sizes = count_calls(target, monkeypatch)

    again = regenerate(target, make_tokenizer(), rows, path, QUICK)

    assert (again, sizes, path.read_bytes()) == (num_written, [], before)


@pytest.mark.parametrize("change", ["options", "rows"])
def test_a_file_begun_otherwise_is_refused(tmp_path: Path, target: PreTrainedModel, change: str) -> None:
    rows, path = make_rows(3), tmp_path / "out.jsonl"
    regenerate(target, make_tokenizer(), rows, path, QUICK)
    options = RegenerateOptions(max_new_tokens=9) if change == "options" else QUICK

    with pytest.raises(OptionError, match=r"must hold measurements under the same settings.*write to another file"):
        regenerate(target, make_tokenizer(), rows if change == "options" else rows[:2], path, options)


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path, target: PreTrainedModel) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine")

    with pytest.raises(OptionError, match="exists but was not begun by `regenerate`"):
        regenerate(target, make_tokenizer(), make_rows(2), path, QUICK)

    assert path.read_text() == "mine"


def test_prompts_that_are_too_long_or_do_not_fit_the_template_are_left_out(
    tmp_path: Path, target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    rows, path = make_rows(4), tmp_path / "out.jsonl"
    rows[1] = [{"role": "user", "content": "one " * 80}, rows[1][1]]
    rows[2] = [{"role": "system", "content": "be brief"}, *rows[2]]
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN_TEMPLATE

    num_written = regenerate(target, make_tokenizer(refusing), rows, path, QUICK)

    assert num_written == 2
    assert sorted(line["row"] for line in read(path)) == [0, 3]
    assert (
        "1 are left out by a prompt longer than `max_prompt_tokens`; 1 are left out by a prompt that the chat template"
        in caplog.text
    )
    assert "row 1: a prompt must have 1 to 60 tokens, but it has" in caplog.text
    assert "row 2: chat template and tokenizer must take the prompt, but say TemplateError: no." in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_answer_goes_beyond_the_context_of_the_target(
    tmp_path: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target("gpt2", n_positions=20)  # positions that are learned, and end
    rows = [row_of("one", "two"), row_of(" ".join(["one"] * 12), "two"), row_of("two", "four")]
    options = RegenerateOptions(max_new_tokens=12, temperature=temperature)

    assert regenerate(target, make_tokenizer(), rows, tmp_path / "out.jsonl", options) == 2

    assert [entry["row"] for entry in read(tmp_path / "out.jsonl")] == [0, 2]
    assert "must fit into the target's context of 20" in caplog.text
    assert "1 are left out by a prompt without space for `max_new_tokens` in the context" in caplog.text


def test_a_conversation_that_grows_too_long_ends_with_its_last_answer(tmp_path: Path, target: PreTrainedModel) -> None:
    (first,), path = make_rows(1), tmp_path / "out.jsonl"
    row = [*first, {"role": "user", "content": "one " * 80}, {"role": "assistant", "content": "two"}]

    regenerate(target, make_tokenizer(), [row], path, QUICK)

    (line,) = read(path)
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_batches_hold_prompts_of_like_length(
    tmp_path: Path, target: PreTrainedModel, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[torch.Tensor] = []
    generate = target.generate
    monkeypatch.setattr(target, "generate", lambda **kw: masks.append(kw["attention_mask"]) or generate(**kw))
    options = RegenerateOptions(max_new_tokens=2, batch_size=batch_size)

    regenerate(target, make_tokenizer(), make_rows(7), tmp_path / "out.jsonl", options)

    lengths = [length for mask in masks for length in mask.sum(dim=1).tolist()]
    assert list(map(len, masks)) == [min(batch_size, 7 - start) for start in range(0, 7, batch_size)]
    assert lengths == sorted(lengths)
    assert [line["row"] for line in read(tmp_path / "out.jsonl")] == list(range(7))


def test_the_seed_decides_the_text_and_the_global_stream_stays(tmp_path: Path, target: PreTrainedModel) -> None:
    texts = []
    before = torch.get_rng_state()

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = RegenerateOptions(max_new_tokens=8, batch_size=2, seed=seed)
        regenerate(target, make_tokenizer(), make_rows(4), tmp_path / name, options)
        texts.append((tmp_path / name).read_text())

    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_question_in_another_batch_is_answered_anew(tmp_path: Path, target: PreTrainedModel) -> None:
    path, options = tmp_path / "out.jsonl", RegenerateOptions(max_new_tokens=8, batch_size=1, temperature=1.0)

    regenerate(target, make_tokenizer(), make_rows(1) * 4, path, options)

    assert len({line["messages"][1]["content"] for line in read(path)}) > 1


@pytest.mark.parametrize(
    ("name", "kwargs", "num_tokens"),
    [("chatml", {}, 256), ("qwen3", {}, 4096), ("qwen3", {"enable_thinking": False}, 256), ("deepseek-r1", {}, 4096)],
)
def test_answers_are_long_where_the_target_thinks(name: str, kwargs: dict[str, Any], num_tokens: int) -> None:
    template = ChatTemplate(family_tokenizer(name), kwargs)

    assert with_length(RegenerateOptions(), template).max_new_tokens == num_tokens
    assert with_length(RegenerateOptions(max_new_tokens=7), template).max_new_tokens == 7


def test_cut_answers_are_counted_over_all_runs_of_a_file(
    tmp_path: Path, target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    rows, path = dialogues(8), tmp_path / "out.jsonl"

    for _ in range(2):
        regenerate(target, make_tokenizer(), rows, path, GREEDY)

    num_cut = sum("ended_by" in line for line in read(path))
    cut = [not answer_alone(target, line["messages"][:-1])[1] for line in read(path)]
    assert 0 < num_cut == sum(cut) < 8
    said = [message for message in caplog.messages if message.startswith("8 conversations")]
    assert len(said) == 2
    assert all(f"{num_cut} are cut short by an answer that was cut at `max_new_tokens`" in message for message in said)


def test_a_thought_that_is_cut_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_target(vocab_size=280, **SMALL)  # without an end
    rows, path = make_rows(3), tmp_path / "out.jsonl"

    for _ in range(2):  # nothing is asked again
        with pytest.raises(ConversationError, match="At least one conversation must get an answer, but none did"):
            regenerate(target, family_tokenizer("deepseek-r1"), rows, path, GREEDY)

    assert not path.exists()
    assert "3 are left out by a thought that was cut at `max_new_tokens`" in caplog.text


def test_arguments_for_the_chat_template_reach_every_prompt(
    tmp_path: Path, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    generate = target.generate
    monkeypatch.setattr(target, "generate", lambda **kw: seen.append(kw["input_ids"]) or generate(**kw))
    tokenizer = make_tokenizer(PLAIN_TEMPLATE + "{{ ending }}")

    regenerate(target, tokenizer, make_rows(4), tmp_path / "a.jsonl", QUICK, {"ending": "<system>"})

    ending = tokenizer.convert_tokens_to_ids("<system>")
    assert seen[0][:, -1].tolist() == [ending] * 2
    with pytest.raises(OptionError, match=r"was begun with .*'template_kwargs': {'ending': '<system>'}"):
        regenerate(target, tokenizer, make_rows(4), tmp_path / "a.jsonl", QUICK)


def test_thoughts_between_special_tokens_are_a_servers_business(tmp_path: Path, target: PreTrainedModel) -> None:
    with pytest.raises(OptionError, match=r"part thoughts from words by special tokens.*`--endpoint URL`"):
        regenerate(target, family_tokenizer("gpt-oss"), make_rows(1), tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, but it is 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"max_prompt_tokens": -5}, "`max_prompt_tokens` must be at least 1, but it is -5"),
        ({"temperature": -0.5}, r"`temperature` must be at least 0, but it is -0\.5"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        RegenerateOptions(**options)


HALF = "nice \ud83d"  # half of an emoji, as texts have that were cut by UTF-16 units


def row_of(*questions: str) -> list[dict[str, str]]:
    return [turn for text in questions for turn in (user(text), {"role": "assistant", "content": "x"})]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("question", "template", "reason"),
    [
        (HALF, PLAIN_TEMPLATE, "half a character"),
        (
            "three",
            "{{ messages[-1]['content'] + 1 if 'three' in messages[-1]['content'] }}" + PLAIN_TEMPLATE,
            "refuses",
        ),
        ("three", "{% if 'three' in messages[-1]['content'] %}{{ 1 / 0 }}{% endif %}" + PLAIN_TEMPLATE, "refuses"),
    ],
)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_turn_without_a_prompt_is_named_and_counted_and_all_others_are_answered(
    tmp_path: Path,
    target: PreTrainedModel,
    question: str,
    template: str,
    reason: str,
    turn: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target.generation_config.eos_token_id = list(range(6, 97))  # an answer is one token
    bad = row_of(*["two", question][2 - turn :], "two")
    rows, path, tokenizer = [*dialogues(3), bad, *dialogues(2)], tmp_path / "out.jsonl", make_tokenizer(template)

    num_written = regenerate(target, tokenizer, rows, path, GREEDY)
    before = path.read_bytes()
    again = regenerate(target, tokenizer, rows, path, GREEDY)

    lines = {line["row"]: line for line in read(path)}
    assert num_written == again == len(lines)
    assert path.read_bytes() == before
    assert "row 3: " in caplog.text
    if turn == 1:
        assert sorted(lines) == [0, 1, 2, 4, 5]
        assert "1 are left out by" in caplog.text
    else:
        assert sorted(lines) == [0, 1, 2, 3, 4, 5]
        assert reason in lines[3]["ended_by"]
        assert len(lines[3]["messages"]) == 2
    assert reason in caplog.text


def test_turns_that_are_dropped_are_counted(
    tmp_path: Path, target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    target.generation_config.eos_token_id = list(range(6, 97))  # an answer is one token
    rows = [row_of("one", "one " * 80, "two"), row_of("one", "two", "three")]

    regenerate(target, make_tokenizer(), rows, tmp_path / "out.jsonl", GREEDY)

    first, second = read(tmp_path / "out.jsonl")
    assert first["ended_by"] == "a prompt longer than `max_prompt_tokens`"
    assert [len(line["messages"]) for line in (first, second)] == [2, 6]
    assert "row 0: a prompt must have 1 to 60 tokens, but it has" in caplog.text
    assert "1 are cut short by a prompt longer than `max_prompt_tokens`" in caplog.text


@pytest.fixture
def begun(tmp_path: Path, target: PreTrainedModel) -> Path:
    """A file of answers to six rows."""
    path = tmp_path / "out.jsonl"
    regenerate(target, make_tokenizer(), dialogues(6), path, QUICK)
    return path


@pytest.mark.parametrize("change", ["rows", "chat_template", "target", "generation_config"])
def test_other_rows_templates_and_targets_are_noticed(begun: Path, target: PreTrainedModel, change: str) -> None:
    rows = dialogues(6)
    if change == "rows":
        rows[3] = row_of("ten", "nine")
    if change == "target":
        target.get_input_embeddings().weight.data[0, 0] += 1
    if change == "generation_config":
        target.generation_config.repetition_penalty = 1.5
    tokenizer = make_tokenizer(PLAIN_TEMPLATE + " " if change == "chat_template" else PLAIN_TEMPLATE)

    with pytest.raises(OptionError, match="must hold measurements under the same settings"):
        regenerate(target, tokenizer, rows, begun, QUICK)


def test_old_answers_of_the_rows_do_not_matter(begun: Path, target: PreTrainedModel) -> None:
    rows = [
        [{**turn, "content": "x"} if turn["role"] == "assistant" else turn for turn in row] for row in dialogues(6)
    ]

    assert regenerate(target, make_tokenizer(), rows, begun, QUICK) == 6


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_files_have_the_mode_that_the_process_asks_for(tmp_path: Path, target: PreTrainedModel) -> None:
    before = os.umask(0o027)
    try:
        regenerate(target, make_tokenizer(), make_rows(3)[::-1], tmp_path / "out.jsonl", QUICK)
    finally:
        os.umask(before)

    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}
