"""Answers of a target in this process, whatever its tokenizer and its generation config leave out or ask for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.chat import make_rows, make_tokenizer
from tests.tiny import make_target
from tests.training.runs import SMALL
from transformers_falcon_spec.training.answers import (
    Prompt,
    RefusedPromptError,
    Reply,
    TargetAnswerer,
)
from transformers_falcon_spec.training.chat_template import ChatTemplate
from transformers_falcon_spec.training.options import RegenerateOptions

pytestmark = pytest.mark.training

ENDS = [2, *range(6, 45)]
GREEDY = RegenerateOptions(max_new_tokens=14, temperature=0.0)


def small_target(**generation: Any) -> PreTrainedModel:
    target = make_target(**SMALL).double()
    target.generation_config.eos_token_id = ENDS
    for name, value in generation.items():
        setattr(target.generation_config, name, value)
    return target


def prompts(num_rows: int = 9) -> list[Prompt]:
    texts = [row[0]["content"] for row in make_rows(num_rows)]
    return [Prompt([], text, make_tokenizer()(text)["input_ids"]) for text in texts]


def answers(target: PreTrainedModel, tokenizer: Any = None, options: RegenerateOptions = GREEDY) -> list[Any]:
    return list(TargetAnswerer(target, ChatTemplate(tokenizer or make_tokenizer())).answer(prompts(), options, seed=0))


def alone(target: PreTrainedModel) -> list[str]:
    """The greedy answer of one call of `generate` to each prompt."""
    found = []
    for prompt in prompts():
        ids = target.generate(torch.tensor([prompt.ids]), do_sample=False, max_new_tokens=14)[0, len(prompt.ids) :]
        found.append(make_tokenizer().decode(ids, skip_special_tokens=True))
    return found


def test_a_tokenizer_without_a_pad_token_changes_no_answer() -> None:
    bare = make_tokenizer()
    bare.pad_token = None

    assert answers(small_target(pad_token_id=None), bare) == answers(small_target())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("cache_implementation", "static"),
        ("cache_implementation", "quantized"),
        ("prompt_lookup_num_tokens", 3),
        ("penalty_alpha", 0.6),
    ],
)
def test_what_a_generation_config_asks_for_beside_one_text_is_told_and_changes_no_answer(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert answers(small_target(**{name: value})) == answers(small_target())

    assert f"nothing comes of `{name}` of {value}" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_new_tokens", 7),
        ("exponential_decay_length_penalty", (4, 3.0)),
        ("begin_suppress_tokens", list(range(6, 45))),
        ("forced_eos_token_id", 2),
        ("use_cache", False),
        ("repetition_penalty", 1.5),
    ],
)
def test_new_tokens_are_counted_from_the_start_of_an_answer(name: str, value: Any) -> None:
    target = small_target(**{name: value})

    assert [reply.text for reply in answers(target)] == alone(target)


def test_a_stop_string_ends_its_row_alone() -> None:
    plain = answers(small_target())
    stop = next(reply.text[1] for reply in plain if len(reply.text) > 2)

    found = answers(small_target(stop_strings=[stop]))

    assert 0 < sum(one != other for one, other in zip(found, plain, strict=True)) < len(plain)
    for one, other in zip(found, plain, strict=True):
        assert other.text.startswith(one.text)
        assert one.is_complete == (other.is_complete or stop in one.text)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate")]
)
def test_a_batch_that_runs_out_of_memory_is_answered_row_by_row(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = small_target()
    expected, generate = answers(target), target.generate
    longest = max(len(prompt.ids) for prompt in prompts())

    def with_little_memory(**given: Any) -> Any:
        if len(given["input_ids"]) > 1 or given["input_ids"].shape[1] == longest:
            raise error
        return generate(**given)

    monkeypatch.setattr(target, "generate", with_little_memory)
    found = answers(target)

    for prompt, one in zip(prompts(), found, strict=True):
        if len(prompt.ids) == longest:
            assert isinstance(one, RefusedPromptError)
            assert "cannot be answered: it needs more memory than there is" in str(one)
    kept = [number for number, one in enumerate(found) if isinstance(one, Reply)]
    assert 0 < len(kept) < len(found)
    assert [found[number] for number in kept] == [expected[number] for number in kept]
    assert "each is answered alone, as in 1 batches so far: it needs more memory" in caplog.text


def test_a_token_beyond_the_embeddings_is_refused_and_its_batch_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    target, template = small_target(), ChatTemplate(make_tokenizer())
    num_known = target.get_input_embeddings().num_embeddings
    given = [*prompts(3), Prompt([], "", [7, num_known, 8])]

    found = TargetAnswerer(target, template).answer(given, GREEDY, seed=0)

    assert found[:3] == TargetAnswerer(target, template).answer(prompts(3), GREEDY, seed=0)
    assert f"token ids must be below {num_known}" in str(found[3])


def test_another_error_of_the_target_is_not_taken_for_one_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()

    def fail(**_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(target, "generate", fail)
    with pytest.raises(RuntimeError, match="broken"):
        answers(target)


def test_rows_answered_alone_draw_from_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    generate, tokenizer = target.generate, make_tokenizer()

    def with_little_memory(**given: Any) -> Any:
        if len(given["input_ids"]) > 1:
            raise torch.OutOfMemoryError
        return generate(**given)

    monkeypatch.setattr(target, "generate", with_little_memory)
    same = [prompts(1)[0]] * 4
    options = RegenerateOptions(max_new_tokens=8, temperature=1.0)
    found = TargetAnswerer(target, ChatTemplate(tokenizer)).answer(same, options, seed=0)

    assert len({reply.text for reply in found if isinstance(reply, Reply)}) > 1


def test_a_changed_weight_is_another_target(tmp_path: Path) -> None:
    target, template = small_target(), ChatTemplate(make_tokenizer())
    before = TargetAnswerer(target, template).settings
    with torch.no_grad():
        target.get_input_embeddings().weight[0, 0] += 1

    assert TargetAnswerer(target, template).settings != before
