"""Targets with recurrent layers: what is taken back leaves the states of the kept tokens, and nothing else of a call stays."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from tests import hybrids, runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import RECURRENT
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.generation import recurrent
from transformers_falcon_spec.generation.cache import is_recurrent
from transformers_falcon_spec.generation.probe import _prefilled, probe
from transformers_falcon_spec.transformers_versions import CACHE

NUM_NODES = 5
TOLERANCE = 1e-3


def _states(cache: Any) -> list[torch.Tensor]:
    """All tensors that a cache holds."""
    found = []
    for layer in cache.layers:
        if is_recurrent(layer):
            held = (*layer.conv_states.values(), *layer.recurrent_states.values())
            found += [state for state in held if state is not None]
        found += [
            states for states in (getattr(layer, name, None) for name in ("keys", "values")) if states is not None
        ]
    return found


def _assert_same(cache: Any, other: Any) -> None:
    pairs = list(zip(_states(cache), _states(other), strict=True))
    assert len(pairs) > 3
    for mine, theirs in pairs:
        # rules are computed in single precision whatever the target's type
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def _informed(target: PreTrainedModel) -> InformedDrafter:
    """A drafter that knows most of the target's text, tuned as by default."""
    return InformedDrafter(RandomDrafter(), runs.plain(target).sequences)


@torch.no_grad()
def _read_one_by_one(target: PreTrainedModel, ids: torch.Tensor, num_prompt: int) -> DynamicCache:
    """The naive twin: the cache after a prompt and tokens that were read one by one."""
    cache = DynamicCache(config=target.config)
    for start, end in ((0, num_prompt), *((column, column + 1) for column in range(num_prompt, ids.shape[1]))):
        positions = torch.arange(start, end)[None]  # without which Bamba reads wrongly
        target(ids[:, start:end], position_ids=positions, **{CACHE: cache}, use_cache=True)
    return cache


@pytest.mark.families
@pytest.mark.parametrize("num_kept", range(NUM_NODES + 1))
@pytest.mark.parametrize("family", RECURRENT)
def test_states_are_those_of_the_tokens_that_are_kept(family: str, num_kept: int) -> None:
    target = in_double(make_target(family))
    prompt, nodes = make_prompt(9), make_prompt(NUM_NODES, seed=3)
    text = _prefilled(target, prompt, "chain")
    parents = torch.arange(-1, NUM_NODES - 1)[None]

    for number in range(2):  # states are put aside anew by every read
        with torch.no_grad():
            text.read(nodes + number, DraftTree(parents, torch.zeros_like(parents)), "chain")
            text.keep(NUM_NODES, [tuple(range(num_kept))])
    text.leave()

    ids = torch.cat([prompt, nodes[:, :num_kept], nodes[:, :num_kept] + 1], dim=-1)
    expected = _read_one_by_one(target, ids, 9)
    _assert_same(text.cache, expected)
    ids[:, -1] += 1
    others = zip(_states(expected), _states(_read_one_by_one(target, ids, 9)), strict=True)
    assert max(float((one - other).abs().max()) for one, other in others) > 10 * TOLERANCE  # each token tells


class RaisingCriterion(StoppingCriteria):
    """Raises at a length of the text."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] >= 20:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.families)])
@pytest.mark.parametrize("is_tuned", [True, False])  # interrupted behind a root alone, and behind a draft
def test_an_interrupt_leaves_the_states_of_a_text_and_of_no_draft(family: str, is_tuned: bool) -> None:
    target = in_double(make_target(family))
    drafter = _informed(target)
    drafter.generation_config.tune = is_tuned
    cache = DynamicCache(config=target.config)

    with pytest.raises(KeyboardInterrupt):
        runs.drafted(
            target, drafter, past_key_values=cache, stopping_criteria=StoppingCriteriaList([RaisingCriterion()])
        )

    text = runs.plain(target).sequences[:, : cache.get_seq_length()]
    assert cache.get_seq_length() > make_prompt().shape[1]
    _assert_same(cache, _read_one_by_one(target, text, make_prompt().shape[1]))


def test_nothing_of_a_call_stays_on_the_target_or_its_cache() -> None:
    target = make_target("qwen3_5")
    hooks = [len(part._forward_pre_hooks) for part in target.modules()]

    pair = runs.both(target, _informed(target))

    pair.assert_equal()
    assert [len(part._forward_pre_hooks) for part in target.modules()] == hooks
    for layer in pair.drafted.past_key_values.layers:
        assert not {"update_conv_state", "update_recurrent_state"} & vars(layer).keys()


ATTENDING = [name for name in RECURRENT if name != "mamba2"]  # for which plain decoding itself has no weights


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.families) for name in ATTENDING])
def test_attention_weights_are_those_of_plain_decoding(family: str) -> None:
    target = in_double(make_target(family, attn_implementation="eager"))

    pair = runs.both(target, _informed(target), output_attentions=True)

    pair.assert_equal()
    for mine, theirs in zip(pair.drafted.attentions, pair.plain.attentions, strict=True):
        for weights, expected in zip(mine, theirs, strict=True):
            assert (weights is None) == (expected is None)
            if weights is not None:
                torch.testing.assert_close(weights, expected, rtol=TOLERANCE, atol=TOLERANCE)


ALONE = [family for family in RECURRENT if family == "mamba2"]  # whose steps get no mask
MIXERS = {
    "qwen3_5": "the gated delta rule",
    "kimi_linear": "a delta rule with a gate for each channel",
    "nemotron_h": "Mamba 2",
    "falcon_h1": "Mamba 2 beside attention in one layer",
    "zamba2": "Mamba 2 with attention that layers share",
    "zaya": "convolutions of attention's keys",
    "mamba2": "Mamba 2 alone",
}


@pytest.mark.parametrize("knows", hybrids.DRAFTERS)
@pytest.mark.parametrize("use", hybrids.USES)
@pytest.mark.parametrize("family", [family for family in MIXERS if family in RECURRENT])
def test_every_use_gives_what_plain_decoding_gives(family: str, use: str, knows: str) -> None:
    outcome = hybrids.USES[use](in_double(make_target(family, seed=7)), 3, hybrids.DRAFTERS[knows])

    assert outcome.is_same
    assert outcome.stats.num_drafted > 0
    assert knows == "random" or outcome.stats.acceptance_length > 2


@pytest.mark.parametrize("family", ["qwen3_5", *ALONE])
def test_padding_changes_nothing(family: str) -> None:
    target, prompt = in_double(make_target(family)), make_prompt()
    mask = torch.ones_like(prompt)
    mask[:, :4] = 0

    pair = runs.informed(target, RandomDrafter(), prompt, attention_mask=mask)

    pair.assert_equal()


@pytest.mark.parametrize("family", ["qwen3_5", *ALONE])
def test_rows_of_a_batch_are_read_in_step(family: str) -> None:
    target = in_double(make_target(family))
    prompt = torch.cat([make_prompt(seed=row) for row in range(3)])
    mask = torch.ones_like(prompt)
    mask[-1, :4] = 0

    pair = runs.both(target, RandomDrafter(), prompt, attention_mask=mask)

    pair.assert_equal(is_kept=False)
    assert "nothing is drafted: its recurrent layers keep a state" in pair.stats.notes[0]


def test_a_target_whose_mixers_cannot_read_again_is_not_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3_5")
    monkeypatch.setattr(recurrent.RecurrentStates, "_record", lambda *_: None)  # as if they were not handed the cache

    assert probe(target).form == "plain"
    runs.both(target, RandomDrafter()).assert_equal(is_kept=False)
