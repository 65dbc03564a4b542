"""The forms in which drafts are read: what a call with each of them does and says."""

from dataclasses import replace

import pytest
import torch

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.generation import loop
from transformers_falcon_spec.generation.probe import probe


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_target_that_reads_one_token_at_a_time_is_given_no_drafts_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    target = make_target("llama")
    prompt = torch.cat([make_prompt(9, seed) for seed in range(num_rows)])
    gold = runs.plain(target, prompt, max_new_tokens=12)
    plain = replace(probe(target), form="plain", batch_form="plain", reason="it was said so")
    monkeypatch.setattr(loop, "probe", lambda *_: plain)
    shapes: list[torch.Size] = []
    target.model.register_forward_hook(lambda _module, _args, output: shapes.append(output[0].shape[:2]))
    drafter = InformedDrafter(RandomDrafter(tune=False), gold.sequences)

    pair = runs.both(target, drafter, prompt, max_new_tokens=12)

    pair.assert_equal(is_kept=False)
    assert shapes[-11:] == [(num_rows, 1)] * 11
    assert pair.stats.notes == ["The target reads one token at a time, and nothing is drafted: it was said so."]
