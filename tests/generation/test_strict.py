"""Strict mode: choices that rounding could change are left to a forward over one token."""

from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig

from tests import runs
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.errors import OptionError

MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING}


def strict(drafter: Any) -> Any:
    drafter.generation_config = SpeculationConfig(strict=True)
    return drafter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("closeness", [8, 2**46, 2**80], ids=["never", "sometimes", "always"])
def test_the_text_and_the_random_state_are_the_targets_however_many_choices_are_close(
    mode: str, closeness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers_falcon_spec.generation.transcript.CLOSE_ELSEWHERE", closeness)
    target = make_target().double()
    gold = runs.plain(target, max_new_tokens=40, **MODES[mode]).sequences

    pair = runs.both(target, InformedDrafter(strict(RandomDrafter()), gold), max_new_tokens=40, **MODES[mode])

    pair.assert_equal()
    if closeness == 8:
        assert pair.stats.num_reread == 0
    elif closeness == 2**80:
        assert pair.stats.num_accepted == 0
        assert pair.stats.num_reread >= 35  # nearly every token; alone at the end of the text it needs no second look
    else:
        assert 0 < pair.stats.num_reread < pair.stats.num_steps
        assert pair.stats.num_accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_what_rounding_could_change_is_read_again(dtype: torch.dtype) -> None:
    target = make_target().to(dtype)
    gold = runs.plain(target, max_new_tokens=60).sequences

    stats = runs.drafted(target, InformedDrafter(strict(RandomDrafter()), gold), max_new_tokens=60).speculation

    assert stats.num_accepted > 0
    assert (stats.num_reread > 0) == (dtype == torch.bfloat16)


def test_a_token_without_a_draft_is_read_as_plain_decoding_reads_it() -> None:
    pair = runs.both(make_target(), strict(RandomDrafter(proposals=0.0)), output_logits=True)

    assert pair.stats.num_drafted == 0
    assert all(ours.equal(plain) for ours, plain in zip(pair.drafted.logits, pair.plain.logits, strict=True))


def test_a_batch_rereads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers_falcon_spec.generation.transcript.CLOSE_ELSEWHERE", 2**46)
    drafter = strict(make_drafter(make_target().double(), block_size=2))

    pair = batch_and_drafted(make_target().double(), drafter, max_new_tokens=30)

    pair.assert_equal()
    assert pair.stats.num_reread > 0
    assert pair.stats.num_accepted > 0


def test_what_would_be_asked_twice_must_not_remember() -> None:
    watermark = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)

    with pytest.raises(OptionError, match="`strict` asks for scores that may not become text"):
        runs.drafted(make_target(), strict(RandomDrafter()), do_sample=True, watermarking_config=watermark)


def test_strict_goes_with_the_lazy_walk_alone() -> None:
    with pytest.raises(OptionError, match="`verifier` must be \"lazy_walk\", but it is 'gumbel'"):
        SpeculationConfig(strict=True, verifier="gumbel")
