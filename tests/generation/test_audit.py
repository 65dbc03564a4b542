"""Reads are audited in the text: a target that changes its ways at some length, of which no name tells, keeps its own text."""

from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.generation import audit

THRESHOLD = 64
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING, "scores": {"output_scores": True}}
# Rows of a batch draw from streams of their own, so that only one row alone is sampled as plain `generate` does.
CALLS = (("greedy", 1), ("greedy", 3), ("sampling", 1), ("scores", 1), ("scores", 3))
SPARES = ("", "chain")
# Each call with each thing that is spared, from before the length, at it and behind it in turn; one call at all of them.
LENGTHS = (12, 63, 64, 80)
CASES = [("greedy", 1, spares, prompt_len) for spares in SPARES for prompt_len in LENGTHS]
for number, call in enumerate(CALLS[1:]):
    CASES += [(*call, "", LENGTHS[number]), (*call, "chain", LENGTHS[3 - number])]


class Hidden(LlamaForCausalLM):
    """A Llama that says something else of several tokens behind a length; `spares` are what it reads rightly there."""

    threshold = THRESHOLD
    spares = ""

    @wraps(LlamaForCausalLM.forward)  # for what it takes
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        num_read = outputs.logits.shape[1]
        mask = kwargs.get("attention_mask")
        is_tree = isinstance(mask, Tensor) and mask.dim() > 2
        is_spared = self.spares == "chain" and not is_tree
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        num_slots = 0 if cache is None else cache.get_seq_length()
        is_first = num_slots == num_read
        if num_read > 1 and num_slots > self.threshold and not is_first and not is_spared:
            outputs.logits = outputs.logits.roll(1, -1)
        return outputs


@pytest.fixture(autouse=True)
def _low_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FLOOR", 16)


def _hidden(spares: str = "") -> Any:
    target: Any = in_double(make_target())
    target.__class__ = type("HiddenLlama", (Hidden,), {"spares": spares})
    return target


@pytest.mark.parametrize(("mode", "num_rows", "spares", "prompt_len"), CASES)
def test_a_hidden_threshold_changes_no_text(mode: str, num_rows: int, spares: str, prompt_len: int) -> None:
    target = _hidden(spares)
    prompt = torch.cat([make_prompt(prompt_len, seed=row) for row in range(num_rows)])
    gold = runs.plain(target, prompt, max_new_tokens=80, **MODES[mode]).sequences
    drafter = InformedDrafter(RandomDrafter(num_nodes=12), gold)
    drafter.generation_config.capture = False  # in fixed shapes no cache tells this target how long the text is

    pair = runs.both(target, drafter, prompt, max_new_tokens=80, **MODES[mode])

    assert pair.drafted.sequences.tolist() == pair.plain.sequences.tolist()
    if num_rows == 1:
        assert pair.drafted_state.equal(pair.plain_state)
    assert any("scores were wrong" in note for note in pair.stats.notes)
    if spares or prompt_len < 60:
        assert pair.stats.num_accepted > 0
    else:  # all drafts stand behind the length: they are read wrongly, and their tokens are written by plain reads
        assert pair.stats.num_steps > 0
    if mode == "scores":
        for mine, other in zip(pair.drafted.scores, pair.plain.scores, strict=True):
            torch.testing.assert_close(mine, other)


def test_drafts_of_which_nothing_is_kept_are_audited_ever_more_rarely() -> None:
    target = in_double(make_target())
    prompt = make_prompt(70, seed=1)
    num_forwards = 0

    def counted(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    counted.__module__ = "accelerate"  # beside a hook of the caller's the target is probed at each call

    gold = runs.plain(target, prompt, max_new_tokens=60).sequences
    drafter = InformedDrafter(RandomDrafter(num_nodes=12, tune=False), gold, hit_rate=0.0)
    runs.drafted(target, drafter, prompt, max_new_tokens=2)  # probed
    with target.register_forward_hook(counted):
        out = runs.drafted(target, drafter, prompt, max_new_tokens=60)

    assert out.sequences.equal(gold)
    assert out.speculation.num_accepted <= 2
    assert num_forwards < 60 * 1.4  # two a token if every draft were audited
