"""What a call returns beside the text: dict, cache, statistics."""

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from tests import runs
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import collect_speculation
from transformers_falcon_spec.generation.processors import RowCriteria


def test_the_dict_is_what_plain_generate_returns_and_says_what_speculation_did() -> None:
    target = make_target().double()
    gold = runs.plain(target, **runs.SAMPLING).sequences
    options = {**runs.SAMPLING, "output_scores": True, "output_logits": True}

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold), **options)

    pair.assert_equal()
    assert isinstance(pair.drafted, GenerateDecoderOnlyOutput)
    assert pair.stats.acceptance_length > 1
    for name in ("scores", "logits"):
        ours, plain = torch.cat(getattr(pair.drafted, name)), torch.cat(getattr(pair.plain, name))
        assert ours.shape == plain.shape == (24, 97)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "opt", "llama4"])
def test_hidden_states_and_attentions_are_those_of_plain_generate(family: str) -> None:
    target = make_target(family, attn_implementation="eager").double()
    gold = runs.plain(target).sequences
    options = {"output_hidden_states": True, "output_attentions": True}

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold), **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
    for name in ("hidden_states", "attentions"):
        ours, plain = getattr(pair.drafted, name), getattr(pair.plain, name)
        assert len(ours) == len(plain) == 24
        for mine, other in zip(ours, plain, strict=True):
            assert [layer.shape for layer in mine] == [layer.shape for layer in other]
            for one, two in zip(mine, other, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)  # norms compute in float32


def test_an_attention_without_weights_gives_those_of_no_layer() -> None:
    pair = batch_and_drafted(make_target().double(), output_attentions=True)  # SDPA, the default

    pair.assert_equal()
    assert pair.drafted.attentions == pair.plain.attentions


def test_hidden_states_may_have_an_axis_before_the_rows() -> None:
    pair = batch_and_drafted(make_target("gemma3n").double(), output_hidden_states=True)

    pair.assert_equal()
    for mine, other in zip(pair.drafted.hidden_states[1:], pair.plain.hidden_states[1:], strict=True):
        assert [tuple(layer.shape) for layer in mine] == [(2, 4, 1, 64)] * 5
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_returned_cache_is_that_of_the_text(family: str) -> None:
    target = make_target(family).double()
    gold = runs.plain(target).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold))

    ours, plain = pair.drafted.past_key_values, pair.plain.past_key_values
    assert ours.get_seq_length() == plain.get_seq_length() == gold.shape[1] - 1
    for layer, other in zip(ours.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=1e-10)
        assert getattr(layer, "record_past", False) == getattr(other, "record_past", False)


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_returned_cache_serves_the_next_turn(family: str, mode: dict[str, Any]) -> None:
    target, drafter = make_target(family).double(), RandomDrafter(feature_layers=(-1,))
    first = runs.both(target, drafter, max_new_tokens=10, **mode)
    turn = torch.cat([first.plain.sequences, make_prompt(5, 9)], dim=-1)
    mode = {**mode, "attention_mask": torch.ones_like(turn)}  # else `generate` takes written pad tokens for padding
    plain = runs.plain(target, turn, past_key_values=first.plain.past_key_values, **mode)

    ours = runs.drafted(
        target,
        InformedDrafter(drafter, plain.sequences),
        turn,
        past_key_values=first.drafted.past_key_values,
        **mode,
    )

    assert ours.sequences.equal(plain.sequences)
    assert ours.speculation.num_accepted > 0
    assert drafter.generators[-1].commits[0].num_new == (turn.shape[1] - 21,)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_cache_that_the_user_filled_is_gone_on_from(family: str) -> None:
    target, caches = make_target(family).double(), []
    for _ in range(2):
        caches.append(DynamicCache(config=target.config))
        with torch.no_grad():
            target(make_prompt()[:, :7], past_key_values=caches[-1])
    plain = runs.plain(target, past_key_values=caches[0])
    drafter = RandomDrafter(feature_layers=(1, -1))

    ours = runs.drafted(target, InformedDrafter(drafter, plain.sequences), past_key_values=caches[1])

    assert ours.sequences.equal(plain.sequences)
    assert ours.speculation.num_accepted > 0
    assert ours.past_key_values is caches[1]
    assert drafter.generators[0].commits[0].num_new == (12 - 7,)


def test_scores_are_kept_only_where_asked_for() -> None:
    out = runs.drafted(make_target(), RandomDrafter())

    assert out.scores is None
    assert out.logits is None


def test_without_a_dict_the_text_alone_is_returned() -> None:
    target = make_target()

    ids = runs.drafted(target, RandomDrafter(), return_dict_in_generate=False)

    assert isinstance(ids, torch.Tensor)
    assert ids.equal(runs.plain(target).sequences)


def test_collectors_get_the_statistics_of_each_call_inside_their_block() -> None:
    target = make_target()

    with collect_speculation() as outer:
        first = runs.drafted(target, RandomDrafter())
        with collect_speculation() as inner:
            second = runs.drafted(target, RandomDrafter())
    runs.drafted(target, RandomDrafter())

    assert outer == [first.speculation, second.speculation]
    assert inner == [second.speculation]


def test_a_collector_has_the_counts_of_a_call_while_it_runs_and_none_of_one_that_fails() -> None:
    seen: list[int] = []

    def watch(_row: torch.Tensor) -> bool:
        seen.append(collected[0].num_steps)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return False

    with collect_speculation() as collected, pytest.raises(KeyboardInterrupt):
        runs.drafted(make_target(), RandomDrafter(), stopping_criteria=StoppingCriteriaList([RowCriteria([watch])]))

    assert seen[0] == 0 < seen[-1]
    assert collected == []


def test_a_collector_does_not_hear_other_threads() -> None:
    target = make_target()

    with collect_speculation() as collected:
        thread = threading.Thread(target=runs.drafted, args=(target, RandomDrafter()))
        thread.start()
        thread.join()

    assert collected == []


def test_logits_are_those_before_a_processor_that_writes_in_place() -> None:
    def forbid(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -1e4
        return scores

    target, prompt = make_target().double(), make_prompt()
    options = {"output_logits": True, "output_scores": True, "logits_processor": LogitsProcessorList([forbid])}

    gold = runs.plain(target, prompt, **options).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold), prompt, **options)

    pair.assert_equal()
    raw = target(pair.drafted.sequences).logits[0, prompt.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(pair.drafted.logits), raw.float(), rtol=1e-5, atol=1e-5)
    assert all((scores[:, ::2] == -1e4).all() for scores in pair.drafted.scores)
