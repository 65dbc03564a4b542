"""Rows that have ended leave a batch: forwards read fewer rows, and everything that a caller sees is as if they had stayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

from tests import runs
from tests.batches import LENGTHS, Prompts, batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter, RandomGenerator
from tests.every_drafter import KINDS, every_drafter
from tests.generation.test_loop import ListStreamer
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.generation import loop, tuning
from transformers_falcon_spec.generation.drafting import TreeCandidateGenerator
from transformers_falcon_spec.generation.loop import SpeculativeDecoding
from transformers_falcon_spec.generation.output import observe_steps
from transformers_falcon_spec.generation.processors import RowCriteria
from transformers_falcon_spec.generation.text_cache import why_no_slots
from transformers_falcon_spec.transformers_versions import CACHE

ENDS = (3, 24, 1, 14)  # new tokens of each row: one ends with the prefill, one goes on alone


def ending(ends: Sequence[int] = ENDS, prompt_len: int = max(LENGTHS)) -> dict[str, Any]:
    """Criteria that end each row after so many new tokens, and pad it."""
    rows = [partial(lambda num, ids: len(ids) >= num, prompt_len + num) for num in ends]
    return {"stopping_criteria": StoppingCriteriaList([RowCriteria(rows)])}


@contextmanager
def rows_read(target: Any) -> Iterator[list[int]]:
    """The rows of each forward of the target inside."""
    read: list[int] = []

    def counted(_module: Any, _args: Any, kwargs: Any) -> None:
        read.append(len(kwargs["input_ids"]))

    counted.__module__ = "accelerate"  # beside a hook of the caller's and criteria of the caller's nothing is drafted
    with target.register_forward_pre_hook(counted, with_kwargs=True):
        yield read


def written(
    target: Any, stays: bool, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> tuple[Any, list[int]]:
    """What a batch writes with a drafter that knows part of the text, with the rows of its forwards."""
    prompts = Prompts.of(lengths)
    options = {"attention_mask": prompts.mask, **ending(), **options}
    text = runs.plain(target, prompts.ids, **options).sequences
    drafter = InformedDrafter(RandomDrafter(), text, mask=prompts.mask)
    with monkeypatch.context() as patch, rows_read(target) as read:
        if stays:
            patch.setattr(SpeculativeDecoding, "drop_ended_rows", lambda _: None)
        out = runs.drafted(target, drafter, prompts.ids, **options)
    assert out.speculation.num_accepted > 0
    return out, read


def assert_only_open_rows_are_read(read: list[int], num_rows: int = 4) -> None:
    read = read[read.index(num_rows) :]  # behind the probe of the target
    assert read == sorted(read, reverse=True)
    assert set(read) == {num_rows, *range(1, num_rows)}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_drafter_are_those_of_a_plain_batch_and_ended_ones_are_not_read(kind: str) -> None:
    target = make_target().double()
    drafter = every_drafter(kind, target)
    batch_and_drafted(target, drafter, max_new_tokens=2)  # the target is probed

    with rows_read(target) as read:
        pair = batch_and_drafted(target, drafter, **ending((5, 24, 2, 15)))

    pair.assert_equal()
    drafted = read[read.index(4, 1 + read.index(4, 1)) :]  # behind the forwards of plain decoding
    assert {1, 2, 3, 4} == set(drafted)
    assert pair.stats.notes == []
    assert [row.num_tokens for row in pair.stats.rows] == [5, 24, 2, 15]


@pytest.mark.parametrize("family", ["gemma3", "llama4", "deepseek_v32", "gpt_neo", "opt", "phi3", "gemma3n"])
def test_ended_rows_leave_every_kind_of_cache(family: str) -> None:
    target = in_double(make_target(family, seed=3))

    pair = batch_and_drafted(target, **ending())

    pair.assert_equal()
    assert not any("last one ended" in note for note in pair.stats.notes)


def test_nothing_that_is_returned_depends_on_whether_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", attn_implementation="eager").double()
    asked = {f"output_{name}": True for name in ("scores", "logits", "hidden_states", "attentions")}

    lengths = (12,) * 4  # padding has NaN in eager attention

    left, read = written(target, False, monkeypatch, lengths, **asked)
    stayed, read_all = written(target, True, monkeypatch, lengths, **asked)

    assert_only_open_rows_are_read(read)
    assert set(read_all) <= {1, 4}  # one row is read by the probe
    assert left.sequences.equal(stayed.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(left[name], stayed[name], rtol=1e-4, atol=1e-4)
    assert [len(row.acceptance_histogram) > 0 for row in left.speculation.rows] == [True, True, False, True]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("is_users", [False, True])
def test_a_cache_that_somebody_gets_holds_all_rows(
    family: str, is_users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(family).double()

    def cache_after(stays: bool) -> Any:
        mine = {CACHE: DynamicCache(config=target.config), "return_dict_in_generate": False}
        if not is_users:
            return written(target, stays, monkeypatch)[0].past_key_values
        prompts = Prompts.of()
        with monkeypatch.context() as patch:
            if stays:
                patch.setattr(SpeculativeDecoding, "drop_ended_rows", lambda _: None)
            options = {"attention_mask": prompts.mask, **ending(), **mine}
            runs.drafted(target, RandomDrafter(), prompts.ids, **options)
        return mine[CACHE]

    for left, stayed in zip(cache_after(False).layers, cache_after(True).layers, strict=True):
        assert left.keys.shape == stayed.keys.shape
        assert left.get_seq_length() == stayed.get_seq_length() == max(LENGTHS) + max(ENDS) - 1
        first = left.get_seq_length() - left.keys.shape[-2]
        for row, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
            held = slice(max(max(LENGTHS) - length - first, 0), max(max(LENGTHS) + end - 1 - first, 0))
            torch.testing.assert_close(left.keys[row, :, held], stayed.keys[row, :, held])
            torch.testing.assert_close(left.values[row, :, held], stayed.values[row, :, held])


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel", "recursive_rejection"])
def test_sampled_rows_have_their_text_whether_or_not_others_leave(
    verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target().double()
    drafter = make_drafter(target)
    drafter.generation_config.verifier = verifier
    drafter.generation_config.tune = False  # these rules' texts follow from the drafts
    prompts = Prompts.of()

    def text() -> torch.Tensor:
        out = runs.drafted(target, drafter, prompts.ids, attention_mask=prompts.mask, do_sample=True, **ending())
        assert [row.num_tokens for row in out.speculation.rows] == list(ENDS)
        return out.sequences

    with rows_read(target) as read:
        left = text()
    monkeypatch.setattr(SpeculativeDecoding, "drop_ended_rows", lambda _: None)

    assert {4, 3, 2, 1} == set(read)
    if verifier == "token_matching":  # others draw what is drafted from one stream of all rows
        assert left.equal(text())


class SeesAllRows:
    """A processor from outside Transformers, which is shown all rows in each call, and forbids one token by row."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        scores[range(len(scores)), [7 + row for row in range(len(scores))]] = -torch.inf
        return scores


def test_what_looks_at_all_rows_and_streamers_get_all_rows() -> None:
    target, prompts, seen = make_target().double(), Prompts.of(), []
    text = runs.plain(target, prompts.ids, attention_mask=prompts.mask, logits_processor=[SeesAllRows()], **ending())

    for drafter in (None, InformedDrafter(RandomDrafter(), text.sequences, mask=prompts.mask)):
        processor, streamer = SeesAllRows(), ListStreamer()
        with rows_read(target) as read:
            options = {"attention_mask": prompts.mask, "logits_processor": [processor], "streamer": streamer}
            out = runs.plain(target, prompts.ids, assistant_model=drafter, **options, **ending())
        seen.append((out.sequences.tolist(), processor.seen, streamer.chunks))

    assert seen[0] == seen[1]
    assert_only_open_rows_are_read(read)
    assert out.speculation.num_accepted > 0


def test_observers_are_shown_all_rows() -> None:
    target, shown = make_target().double(), []

    with observe_steps(lambda draft, paths: shown.append((len(draft.token_ids), len(paths)))):
        batch_and_drafted(target, **ending()).assert_equal()

    assert set(shown) == {(4, 4)}


def test_states_of_large_batches_are_copied_once_an_eighth_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    target, lengths = make_target().double(), tuple(range(3, 14))
    selected, select_rows = [], RandomGenerator.select_rows
    monkeypatch.setattr(
        RandomGenerator,
        "select_rows",
        lambda self, rows: (selected.append(len(rows)), select_rows(self, rows)),  # type: ignore[func-returns-value]
    )

    pair = batch_and_drafted(target, lengths=lengths, **ending(range(2, 24, 2), max(lengths)))

    pair.assert_equal()
    assert len(selected) < 10  # not with every row
    assert 0 < selected[-1] <= 2
    before = [11, *selected]
    assert all(more - less >= loop.LEAST_SHARE * more for more, less in zip(before, selected, strict=False))


def test_costs_are_learned_by_the_rows_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_KNOWN", {})  # which holds drafters after their calls, too
    target = make_target().double()
    drafter = every_drafter("falcon", target)

    pair = batch_and_drafted(target, drafter, **ending((24, 24, 3, 3)))

    pair.assert_equal()
    known = [models for models in tuning._KNOWN.items() if getattr(models[0], "drafter", None) is drafter]
    steps = {key[0][3]: model.num_steps for _, by_target in known for key, model in by_target[target].items()}
    assert {4, 2} <= steps.keys() <= {4, 2, 1}  # what is drafted, by measured costs, decides whether one row ends last
    assert min(steps.values()) > 0
    assert sum(steps.values()) == max(row.num_steps for row in pair.stats.rows)


def _add_to_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = DynamicCache().layer_class_to_replicate.lazy_initialization

    def with_state(self: Any, *states: torch.Tensor) -> None:
        lazy(self, *states)
        self.of_rows = torch.zeros(4, 1)

    monkeypatch.setattr(DynamicCache().layer_class_to_replicate, "lazy_initialization", with_state)


def test_where_rows_cannot_leave_they_are_read_on_and_a_note_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target().double()
    monkeypatch.setattr(RandomGenerator, "select_rows", TreeCandidateGenerator.select_rows)

    pair = batch_and_drafted(target, **ending())

    pair.assert_equal()
    reason = "a `RandomGenerator` has no `select_rows`"
    assert [note for note in pair.stats.notes if "until the last one ended" in note and reason in note]


def test_rows_whose_cache_keeps_more_than_slots_are_given_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target().double()
    _add_to_layers(monkeypatch)

    pair = batch_and_drafted(target, **ending())

    pair.assert_equal(is_kept=False)
    assert [note for note in pair.stats.notes if "keeps ['of_rows'] besides its states" in note]


def test_an_offloaded_cache_keeps_its_rows() -> None:
    cache = runs.prefilled(make_target(), make_prompt()).cache

    assert why_no_slots(cache) is None
    cache.offloading = True
    assert why_no_slots(cache) == "the cache is offloaded"
