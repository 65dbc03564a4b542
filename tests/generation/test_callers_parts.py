"""What a caller brings, caches, masks, limits and ids of their own, counts with a drafter as it does without."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, sdpa_mask

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.test_text_limits import FAMILIES_THAT_SWITCH, longrope
from tests.tiny import in_double, make_prompt, make_target


class RoundedCache(DynamicCache):
    """A cache that changes what it keeps, as one that compresses would."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update((keys * 4).round() / 4, (values * 4).round() / 4, *args, **kwargs)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_cache_with_an_update_of_its_own_keeps_the_whole_text(num_rows: int) -> None:
    target = in_double(make_target())
    prompt = torch.cat([make_prompt(), make_prompt(12, 1)])[:num_rows]
    plain = runs.plain(target, prompt, past_key_values=RoundedCache()).sequences
    knowing = InformedDrafter(RandomDrafter(tune=False), plain)

    drafted = runs.drafted(target, knowing, prompt, past_key_values=RoundedCache())

    assert plain.tolist() != runs.plain(target, prompt).sequences.tolist()
    assert drafted.sequences.tolist() == plain.tolist()
    assert (drafted.speculation.acceptance_length > 1.5) == (num_rows == 1)


def _sinks(*args: Any, mask_function: Any = None, **kwargs: Any) -> Any:
    """The mask of sinks: the first two tokens and the newest sixteen are seen."""

    def is_near(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key > query - 16) | (key < 2)

    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, mask_function=and_masks(mask_function, is_near), **kwargs)


def test_a_mask_by_a_function_of_the_callers_holds_for_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sinks", sdpa_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sinks", _sinks)
    target = in_double(make_target(attn_implementation="sinks"))
    plain = runs.plain(target, make_prompt(), max_new_tokens=40).sequences
    knowing = InformedDrafter(RandomDrafter(tune=False), plain)

    drafted = runs.drafted(target, knowing, make_prompt(), max_new_tokens=40)

    assert plain.tolist() != runs.plain(in_double(make_target()), make_prompt(), max_new_tokens=40).sequences.tolist()
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.speculation.acceptance_length > 1.5
    assert any("makes masks by the function" in note for note in drafted.speculation.notes)


def test_the_best_of_double_logits_is_that_of_their_rounding_as_without_a_drafter() -> None:
    target = in_double(make_target())
    token = int(runs.plain(target, make_prompt()).sequences[0, 20])
    with torch.no_grad():
        target.lm_head.weight[token + 1] = target.lm_head.weight[token] * (1 + 1e-12)
    plain = runs.plain(target, make_prompt()).sequences

    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(tune=False), plain), make_prompt())

    assert token in plain[0].tolist()
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.speculation.acceptance_length > 1.5


@pytest.mark.parametrize("family", FAMILIES_THAT_SWITCH)
def test_a_limit_of_the_callers_own_takes_the_place_of_the_configs_where_rotary_frequencies_switch(
    family: str,
) -> None:
    target = longrope(family)
    options = {"max_new_tokens": 6, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(40)])}
    plain = runs.plain(target, make_prompt(), **options).sequences

    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(tune=False), plain), make_prompt(), **options)

    assert plain.shape[1] == 40
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.speculation.acceptance_length > 1.5


def test_a_static_cache_of_the_callers_stays_as_it_is_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target()
    cache = StaticCache(config=target.config, max_cache_len=64)

    runs.drafted(target, RandomDrafter(), make_prompt(), past_key_values=cache)

    assert "The `StaticCache` that was passed stays as it is" in caplog.text
    assert int(cache.get_seq_length()) == 0


def test_ids_of_32_bits_give_a_text_of_64_as_without_a_drafter() -> None:
    target, prompt = make_target(), make_prompt().int()

    texts = [runs.plain(target, prompt).sequences, runs.drafted(target, RandomDrafter(), prompt).sequences]

    assert [text.dtype for text in texts] == [torch.long] * 2
    assert texts[0].tolist() == texts[1].tolist()


def test_ids_that_are_no_whole_numbers_are_refused_as_without_a_drafter() -> None:
    with pytest.raises(RuntimeError, match="to have one of the following scalar types: Long, Int"):
        runs.drafted(make_target(), RandomDrafter(), make_prompt() + 0.7)


@pytest.mark.parametrize("num_tokens", [10.0, 9.5])
def test_a_limit_that_is_no_whole_number_ends_a_text_as_without_a_drafter(num_tokens: float) -> None:
    pair = runs.informed(make_target().double(), RandomDrafter(), max_new_tokens=num_tokens)

    pair.assert_equal()
    assert pair.plain.sequences.shape[1] == 12 + 10
