"""Several sequences of each prompt: the rows of a batch in which every prompt stands that many times."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from tests import runs
from tests.batches import Prompts
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.test_batch_options import NEGATIVE, StopsAt
from tests.generation.test_loop import ListStreamer
from tests.tiny import CHAIN_FAMILIES, make_drafter, make_prompt, make_target
from transformers_falcon_spec.core.sampling import row_seeds
from transformers_falcon_spec.generation.processors import RowCriteria

NUM = 3


def alone(target: Any, prompts: list[Tensor], **options: Any) -> list[list[int]]:
    """What the target samples without a drafter, one call for each sequence, with the generator of its row."""
    torch.manual_seed(0)
    seeds = row_seeds(NUM * len(prompts))
    return [
        runs.plain(target, prompts[row // NUM], seed=seed, do_sample=True, **options).sequences[0].tolist()
        for row, seed in enumerate(seeds)
    ]


def sampled(target: Any, drafter: Any, gold: Any, prompts: Tensor, **options: Any) -> Any:
    """Sequences of each prompt, drafted by one who knows what they will be."""
    mask = options.get("attention_mask")
    mask = mask if mask is None else mask.repeat_interleave(NUM, dim=0)
    knowing = InformedDrafter(drafter, torch.as_tensor(gold), hit_rate=1.0, mask=mask)
    return runs.drafted(target, knowing, prompts, do_sample=True, num_return_sequences=NUM, **options)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_each_sequence_is_what_the_target_samples_with_the_generator_of_its_row(
    num_prompts: int, capture: bool
) -> None:
    target, prompts = make_target().double(), [make_prompt(12, seed) for seed in range(num_prompts)]
    gold, drafter = alone(target, prompts), make_drafter(target, block_size=2)
    drafter.generation_config.capture = capture

    out = sampled(target, drafter, gold, torch.cat(prompts))

    assert out.sequences.tolist() == gold
    assert len({tuple(row) for row in gold}) == NUM * num_prompts
    assert [row.num_tokens for row in out.speculation.rows] == [24] * NUM * num_prompts
    assert all(row.num_accepted > 0 for row in out.speculation.rows)
    assert not capture or not any("The step is not captured" in note for note in out.speculation.notes)


@pytest.mark.families
@pytest.mark.parametrize("family", CHAIN_FAMILIES)
def test_sequences_of_targets_that_read_chains_are_their_own(family: str) -> None:
    target, prompts = make_target(family).double(), [make_prompt(12)]
    gold = alone(target, prompts)

    out = sampled(target, RandomDrafter(), gold, prompts[0])

    assert out.sequences.tolist() == gold
    assert out.speculation.num_accepted > 0


@pytest.mark.families
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
        {"guidance_scale": 1.7, "negative_prompt_ids": NEGATIVE.ids, "negative_prompt_attention_mask": NEGATIVE.mask},
        {"eos_token_id": list(range(3, 20)), "output_scores": True, "output_hidden_states": True},
        {"stopping_criteria": StoppingCriteriaList([StopsAt([4])]), "max_new_tokens": 12},
    ],
    ids=["repetition", "encoder", "guidance", "outputs", "lockstep"],
)
def test_padded_prompts_give_the_rows_of_a_batch_that_repeats_them(options: dict[str, Any]) -> None:
    prompts, target = Prompts.of(), make_target().double()
    repeated = {"attention_mask": prompts.mask.repeat_interleave(NUM, dim=0), **options, "do_sample": True}
    for name in {"negative_prompt_ids", "negative_prompt_attention_mask"} & set(options):
        repeated[name] = options[name].repeat_interleave(NUM, dim=0)
    ids = prompts.ids.repeat_interleave(NUM, dim=0)
    gold = runs.drafted(target, RandomDrafter(), ids, **repeated)

    out = sampled(target, RandomDrafter(), gold.sequences, prompts.ids, attention_mask=prompts.mask, **options)

    assert out.sequences.tolist() == gold.sequences.tolist()
    assert len(out.speculation.rows) == NUM * len(prompts.ids)
    assert out.speculation.num_accepted > 0
    for mine, theirs in zip(out.scores or (), gold.scores or (), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(out.hidden_states or (), gold.hidden_states or (), strict=True):
        torch.testing.assert_close(mine[-1][:, -1:], theirs[-1][:, -1:])


def test_penalties_for_the_prompt_are_those_of_the_sequences_own_prompt() -> None:
    target, prompts = make_target().double(), [make_prompt(12, seed) for seed in range(2)]
    options = {"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 2}
    gold = alone(target, prompts, **options)

    out = sampled(target, RandomDrafter(), gold, torch.cat(prompts), **options)

    assert out.sequences.tolist() == gold
    assert out.sequences.tolist() != alone(target, prompts)
    assert out.speculation.num_accepted > 0


def test_a_streamer_gets_all_rows_as_without_a_drafter() -> None:
    target, streamers = make_target().double(), [ListStreamer(), ListStreamer()]
    options = {"num_return_sequences": NUM, "do_sample": True, "max_new_tokens": 6}

    runs.plain(target, streamer=streamers[0], **options)
    out = runs.drafted(target, RandomDrafter(), streamer=streamers[1], **options)

    assert [len(chunk) for chunk in streamers[1].chunks] == [len(chunk) for chunk in streamers[0].chunks]
    assert list(map(list, zip(*streamers[1].chunks[1:], strict=True))) == out.sequences[:, 12:].tolist()


def test_row_criteria_hold_one_for_each_sequence() -> None:
    target, ends = make_target().double(), [14, 20, 17]
    criteria = StoppingCriteriaList([RowCriteria([lambda ids, end=end: len(ids) >= end for end in ends])])
    options = {"stopping_criteria": criteria, "pad_token_id": 0}
    gold = alone(target, [make_prompt()])

    out = sampled(target, RandomDrafter(), gold, make_prompt(), **options)

    for row, text, end in zip(out.sequences.tolist(), gold, ends, strict=True):
        assert row == text[:end] + [0] * (20 - end)


@pytest.mark.parametrize("assistant", [None, RandomDrafter()])
def test_greedy_decoding_has_one_sequence_with_a_drafter_as_without(assistant: Any) -> None:
    with pytest.raises(ValueError, match=r"Greedy methods .* do not support `num_return_sequences` different than 1"):
        runs.plain(make_target(), assistant_model=assistant, num_return_sequences=2)


def test_a_function_of_allowed_tokens_is_asked_as_transformers_asks_it_by_prompt_or_in_older_versions_by_row() -> None:
    prompts, target = Prompts.of(), make_target().double()
    asked: list[set[int]] = []

    def allowed(number: int, _text: torch.Tensor) -> list[int]:
        asked[-1].add(number)
        return list(range(8 * number, 8 * number + 8))

    options = {
        "do_sample": True,
        "num_return_sequences": NUM,
        "prefix_allowed_tokens_fn": allowed,
        "max_new_tokens": 6,
    }
    for write in (partial(runs.plain, target), partial(runs.drafted, target, RandomDrafter())):
        asked.append(set())
        texts = write(prompts.ids, attention_mask=prompts.mask, **options)

    new = texts.sequences[:, prompts.ids.shape[1] :]
    assert asked[0] == asked[1]
    num_each = len(new) // len(asked[0])
    for row, tokens in enumerate(new.tolist()):
        assert {token // 8 for token in tokens} == {row // num_each}
