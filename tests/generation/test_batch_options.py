"""Batches: criteria, processors, streamers and outputs, as a plain batch has them."""

from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from tests import runs
from tests.batches import Prompts, batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.test_loop import ListStreamer
from tests.tiny import (
    VOCAB_SIZE,
    make_prompt,
    make_target,
)
from transformers_falcon_spec.core.verification import TokenTree, match_tokens
from transformers_falcon_spec.generation import processors
from transformers_falcon_spec.generation.acceptors import NodeScores
from transformers_falcon_spec.generation.sequence_batch import SequenceBatch
from transformers_falcon_spec.transformers_versions import CACHE


class StopsAt(StoppingCriteria):
    """Stops each row when it has a token of its own; no row is padded, for it is no EOS."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(self.tokens))


@pytest.mark.parametrize("is_lockstep", [True, False])
def test_without_eos_rows_that_are_complete_grow_with_the_others(
    is_lockstep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_lockstep:
        monkeypatch.setattr(processors, "ROW_CRITERIA", (*processors.ROW_CRITERIA, StopsAt))
    target = make_target().double()
    text = runs.plain(target, Prompts.of().ids, attention_mask=Prompts.of().mask, max_new_tokens=40).sequences
    criterion = StopsAt([int(text[0, 15]), int(text[1, 20]), int(text[2, 25]), int(text[3, 30])])

    pair = batch_and_drafted(target, stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=40)

    pair.assert_equal()
    assert pair.drafted.sequences.shape[1] < 52
    assert pair.stats.num_accepted > 0


def test_without_eos_rows_that_keep_in_step_are_complete_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "ROW_CRITERIA", (*processors.ROW_CRITERIA, StopsAt))
    target = make_target("lfm2").double()  # keeps states
    text = runs.plain(target, Prompts.of().ids, attention_mask=Prompts.of().mask).sequences
    criterion = StopsAt([int(text[0, 15]), int(text[3, 30])])  # the first row waits for the last one

    pair = batch_and_drafted(target, stopping_criteria=StoppingCriteriaList([criterion]))

    pair.assert_equal(is_kept=False)
    caches = [getattr(output, CACHE) for output in (pair.plain, pair.drafted)]
    assert caches[1].get_seq_length() == caches[0].get_seq_length()


class CountsItsCalls(LogitsProcessor):
    """Forbids a token that depends on how often it was asked: a state for each row."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        scores[:, self.num_calls % VOCAB_SIZE :: 3] = -torch.inf
        return scores


NEGATIVE = Prompts.of((4, 7, 2, 3))


def _allowed(row: int, text: torch.Tensor) -> list[int]:
    return list(range(row + 2 + int(text[-1] + 1) % 2, VOCAB_SIZE, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": _allowed},
        {"guidance_scale": 1.7},
        {"bad_words_ids": [[5], [8, 9]], "min_new_tokens": 9, "eos_token_id": list(range(3, 50))},
        {"logits_processor": CountsItsCalls},
        {"guidance_scale": 1.7, "negative_prompt_ids": NEGATIVE.ids, "negative_prompt_attention_mask": NEGATIVE.mask},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
    ],
    ids=lambda options: list(options)[min(len(options), 3) // 2],
)
def test_processors_see_each_row_as_a_plain_batch_shows_it(options: dict[str, Any]) -> None:
    prompts, target = Prompts.of(), make_target().double()

    def call(**more: Any) -> Any:
        fresh = {
            name: LogitsProcessorList([value()]) if isinstance(value, type) else value
            for name, value in options.items()
        }
        return runs.plain(target, prompts.ids, attention_mask=prompts.mask, **fresh, **more)

    gold = call()
    drafted = call(assistant_model=InformedDrafter(RandomDrafter(), gold.sequences, mask=prompts.mask))

    assert drafted.sequences.tolist() == gold.sequences.tolist()
    assert drafted.speculation.num_accepted > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_outputs_of_a_batch_are_those_of_a_plain_one(family: str) -> None:
    target = make_target(
        family, attn_implementation="eager"
    )  # in double precision padding makes Transformers' eager NaN
    names = ("scores", "logits", "hidden_states", "attentions")

    pair = batch_and_drafted(target, **{f"output_{name}": True for name in names})

    pair.assert_equal()
    for name in names:
        ours, plain = getattr(pair.drafted, name), getattr(pair.plain, name)
        assert len(ours) == len(plain) == 24
        for step, (left, right) in enumerate(zip(ours, plain, strict=True)):
            layers = zip(left, right, strict=True) if isinstance(left, tuple) else [(left, right)]
            for mine, theirs in layers:
                first = 9 if step == 0 and isinstance(left, tuple) else 0  # what padding reads means nothing
                torch.testing.assert_close(mine[..., first:, :], theirs[..., first:, :], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_the_returned_cache_of_a_batch_can_be_continued(family: str) -> None:
    target, prompts = make_target(family).double(), Prompts.of()
    pair = batch_and_drafted(target, max_new_tokens=20)
    mask = torch.cat([prompts.mask, torch.ones(4, 21, dtype=torch.long)], dim=-1)
    text = torch.cat([pair.plain.sequences, make_prompt(4, seed=9).reshape(4, 1)], dim=-1)

    caches = [pair.plain.past_key_values, pair.drafted.past_key_values]
    plain, ours = (runs.plain(target, text, attention_mask=mask, past_key_values=cache).sequences for cache in caches)

    assert ours.tolist() == plain.tolist()
    assert [layer.keys.shape for layer in caches[1].layers] == [layer.keys.shape for layer in caches[0].layers]


@pytest.mark.parametrize("is_eos", [True, False])
def test_a_streamer_gets_a_step_when_all_rows_have_taken_it(is_eos: bool) -> None:
    target, streamers = make_target().double(), [ListStreamer(), ListStreamer()]
    prompts = Prompts.of()
    ends = runs.plain(target, prompts.ids, attention_mask=prompts.mask).sequences[:, 20].tolist()
    stop = {"eos_token_id": ends[:2]} if is_eos else {"stopping_criteria": StoppingCriteriaList([StopsAt(ends)])}
    options = {"attention_mask": prompts.mask, **stop}

    gold = runs.plain(target, prompts.ids, streamer=streamers[0], **options).sequences
    informed = InformedDrafter(RandomDrafter(), gold, mask=prompts.mask)
    runs.drafted(target, informed, prompts.ids, streamer=streamers[1], **options)

    assert streamers[1].chunks == streamers[0].chunks
    assert streamers[1].num_ends == 1


def emit(batch: SequenceBatch, row: int, token: int) -> None:
    """Let the target choose a token for a row, and make it text."""
    tree, logits = TokenTree([-1], [0]), torch.eye(VOCAB_SIZE)[token][None]
    scores = [NodeScores(sequence, tree, logits, batch.probs_device) for sequence in batch.rows]
    batch.emit({row: match_tokens(scores[row].tree, scores[row].token_after)}, scores)


def test_what_waits_for_the_end_of_a_row_is_streamed_at_the_end() -> None:
    config, streamer = GenerationConfig(do_sample=False), ListStreamer()
    config._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(4), EosTokenCriteria(9)])
    batch = SequenceBatch(
        make_prompt(1).repeat(2, 1), None, LogitsProcessorList(), criteria, config, streamer=streamer
    )

    for row, token in [(0, 5), (0, 6), (0, 7), (1, 9)]:
        emit(batch, row, token)
    batch.end()

    assert streamer.chunks == [[5, 9], [6, 0], [7, 0]]


def test_without_eos_a_streamer_waits_for_rows_that_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "ROW_CRITERIA", (*processors.ROW_CRITERIA, StopsAt))
    config, streamer, criteria = (
        GenerationConfig(do_sample=False),
        ListStreamer(),
        StoppingCriteriaList([StopsAt([9])]),
    )
    batch = SequenceBatch(
        make_prompt(1).repeat(2, 1), None, LogitsProcessorList(), criteria, config, streamer=streamer
    )

    for row, token in [(0, 9), (1, 5), (1, 6), (0, 7)]:
        emit(batch, row, token)

    assert streamer.chunks == [[9, 5], [7, 6]]
