"""The parity check tells identical text, proven ties and real differences apart."""

import pytest
import torch
from torch import nn

from tests.chat import make_tokenizer
from tests.tiny import VOCAB_SIZE, make_drafter, make_target
from transformers_falcon_spec.evaluation.parity import check_parity
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.generation.target import Target

PROMPT = Prompt("sums", "a", (("user", "one plus two"),))
GREEDY = {"do_sample": False}


def test_a_faithful_drafter_gives_identical_text() -> None:
    target = make_target()

    result = check_parity(target, make_tokenizer(), make_drafter(target), PROMPT, GREEDY, 12)

    assert (result.verdict, result.num_tokens, result.first_difference) == ("identical", 12, None)


def test_a_broken_verifier_is_called_different(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter = make_drafter(target)
    probe(target)
    read = Target.read

    def shifted(self: Target, *args: object, **kwargs: object) -> object:
        reading = read(self, *args, **kwargs)
        return type(reading)(reading.logits.roll(1, dims=-1), reading.features)

    monkeypatch.setattr(Target, "read", shifted)

    result = check_parity(target, make_tokenizer(), drafter, PROMPT, GREEDY, 12)

    assert (result.verdict, result.first_difference) == ("different", 1)


def test_a_flip_between_equal_logits_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter = make_drafter(target)
    probe(target)
    with torch.no_grad():  # two tokens are equally good everywhere
        target.lm_head.weight[7] = target.lm_head.weight[8]
        target.lm_head.bias = nn.Parameter(torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor([7, 8]), 1e3))
    read = Target.read

    def rounded(self: Target, *args: object, **kwargs: object) -> object:
        reading = read(self, *args, **kwargs)
        noise = torch.linspace(0, 1e-2, reading.logits.shape[-1])  # some units in the last place of 1000
        return type(reading)(reading.logits + noise, reading.features)

    monkeypatch.setattr(Target, "read", rounded)

    result = check_parity(target, make_tokenizer(), drafter, PROMPT, GREEDY, 6)

    assert (result.verdict, result.first_difference, result.gap) == ("tie", 1, 0.0)
