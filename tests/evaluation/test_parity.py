"""The parity check distinguishes identical text, proven ties and bugs, whatever a broken verifier does to hide."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.chat import make_tokenizer
from tests.tiny import VOCAB_SIZE, make_drafter, make_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.parity import GenerateCall, ParityCheck, first_difference, replay_plain
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.generation.acceptors import NodeScores
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.generation.tuning import Tuner

PROMPT = Prompt("sums", "a", (("user", "one plus two"),))
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
LOGIT = 1e3  # of the two best tokens of `undecided`: float32 holds it to 6e-5, and rounding explains 0.35


def make_check(target: PreTrainedModel | None = None, **options: Any) -> ParityCheck:
    target = make_target() if target is None else target
    probe(target)  # before a test breaks the reading of trees
    return ParityCheck(target, make_tokenizer(), make_drafter(target), **{"max_new_tokens": 12, **options})


def undecided(lead: float = 0.0) -> PreTrainedModel:
    """A target whose best tokens are 7 and 8 everywhere, 7 by `lead`; an equal pair is won by 7."""
    target = make_target()
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[8]
        bias = torch.zeros(VOCAB_SIZE)
        bias[7], bias[8] = LOGIT + lead, LOGIT
        target.lm_head.bias = nn.Parameter(bias)
    return target


def change_tree_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on trees are read with other logits than the target's."""
    read = Target.read

    def changed(self: Target, *args: object, **kwargs: object) -> object:
        reading = read(self, *args, **kwargs)
        return type(reading)(change(reading.logits), reading.features)

    monkeypatch.setattr(Target, "read", changed)


def prefer_eight(logits: torch.Tensor, by: float = 1e-3) -> torch.Tensor:
    """Rounding that happens to favour token 8."""
    return logits + by * torch.nn.functional.one_hot(torch.tensor(8), VOCAB_SIZE)


def commit_second_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the walk commits the second best token of what the target says."""
    monkeypatch.setattr(NodeScores, "token_after", lambda self, node: int(self.logits[node].topk(2).indices[1]))


def failed(result: Any) -> list[str]:
    return [check.statement.split(":")[0] for check in result.difference.checks if not check.holds]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_faithful_drafter_gives_identical_text(options: dict[str, Any]) -> None:
    result = make_check().run(PROMPT, options)

    assert (result.verdict, result.num_tokens, result.first_difference) == ("identical", 12, None)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_that_is_read_wrong_is_a_bug(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    check = make_check()
    change_tree_logits(monkeypatch, lambda logits: logits.roll(1, dims=-1))

    result = check.run(PROMPT, options)

    assert result.verdict == "bug"
    assert "The logits in the tree differ from those alone by no more than rounding explains." in failed(result)
    assert result.difference.plain["token_id"] != result.difference.drafted["token_id"]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_walk_that_commits_another_token_is_a_bug(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    check = make_check()
    commit_second_best(monkeypatch)

    result = check.run(PROMPT, options)

    assert (result.verdict, result.first_difference) == ("bug", 0)
    assert failed(result)[0].startswith("Plain decoding, given the tree's logits at this step")


def test_a_broken_walk_between_two_close_tokens_is_still_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(undecided(lead=1e-4), max_new_tokens=4)
    change_tree_logits(monkeypatch, lambda logits: prefer_eight(logits, by=5e-5))  # 7 stays the best
    commit_second_best(monkeypatch)

    result = check.run(PROMPT, GREEDY)

    assert result.verdict == "bug"
    assert failed(result)[0].startswith("Plain decoding, given the tree's logits at this step")
    gap = float(re.split(" [<>]=? ", result.difference.checks[-1].measured)[0])
    assert gap < 4 * 1e-3  # the gap alone would not show it


def test_a_text_that_ends_early_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    run_call = GenerateCall.run

    def cut(self: GenerateCall, drafter: Any, **arguments: Any) -> Any:
        run = run_call(self, drafter, **arguments)
        return replace(run, new_ids=run.new_ids[:-2]) if drafter is not None else run

    monkeypatch.setattr(GenerateCall, "run", cut)

    result = make_check().run(PROMPT, GREEDY)

    assert (result.verdict, result.first_difference) == ("bug", 10)
    assert result.difference.drafted["token_id"] is None
    assert "the target alone writes 12 tokens, with the drafter it writes 10" in result.difference.reason


def test_a_difference_that_does_not_come_again_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check()
    changes: Iterator[int] = iter([1])  # the first tree alone
    change_tree_logits(monkeypatch, lambda logits: logits.roll(next(changes, 0), dims=-1))

    result = check.run(PROMPT, GREEDY)

    assert result.verdict == "bug"
    assert "with the drafter: another text with the same seed" in result.difference.reason


def test_a_flip_between_equally_good_tokens_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(undecided(), max_new_tokens=6)
    change_tree_logits(monkeypatch, prefer_eight)

    result = check.run(PROMPT, GREEDY)

    assert (result.verdict, result.first_difference) == ("tie", 1)
    assert (result.difference.plain["token_id"], result.difference.drafted["token_id"]) == (7, 8)
    assert result.difference.checks[-1].measured.startswith("0 <= 0.00")  # four times the thousandth
    assert failed(result) == []


def test_a_tuned_draft_is_as_large_in_the_replay_as_it_was_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(undecided(), max_new_tokens=6)
    tuners: list[Tuner] = []

    def limited(self: Tuner, budget: DraftBudget) -> DraftBudget:
        """Whole drafts in the first call, a node in later ones."""
        tuners.append(self)
        return replace(budget, num_nodes=budget.num_nodes if self is tuners[0] else 2)

    monkeypatch.setattr(Tuner, "limited", limited)
    change_tree_logits(monkeypatch, lambda logits: prefer_eight(logits) if logits.shape[1] > 2 else logits)

    result = check.run(PROMPT, GREEDY)

    assert (result.verdict, result.first_difference) == ("tie", 1)
    assert {*tuners} == {tuners[0]}


def test_a_draw_that_falls_within_rounding_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(undecided(lead=1.0), max_new_tokens=6)  # a large gap before the draw
    change_tree_logits(monkeypatch, lambda logits: prefer_eight(logits, by=0.1))

    results = (replace(check, seed=seed).run(PROMPT, SAMPLED) for seed in range(100))
    result = next(result for result in results if result.verdict != "identical")

    assert result.verdict == "tie"
    gap = float(result.difference.checks[-1].measured.partition(" <= ")[0])
    assert 0 < gap < 1.0 / SAMPLED["temperature"]


def test_a_leap_between_distant_tokens_is_a_bug_even_if_the_tree_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(undecided(lead=1.0), max_new_tokens=6)
    change_tree_logits(monkeypatch, lambda logits: prefer_eight(logits, by=2.0))

    result = check.run(PROMPT, GREEDY)

    assert result.verdict == "bug"
    assert failed(result) == ["The logits in the tree differ from those alone by no more than rounding explains."]


def test_every_difference_in_bfloat16_is_explained() -> None:
    check = make_check(make_target().to(torch.bfloat16), max_new_tokens=32)
    prompts = [Prompt("sums", str(i), (("user", text),)) for i, text in enumerate(["one", "two", "three", "four"])]

    results = [check.run(prompt, options) for prompt in prompts for options in (GREEDY, SAMPLED)]

    assert {result.verdict for result in results} <= {"identical", "tie"}


def test_a_replay_gives_the_token_that_was_written_and_takes_other_logits() -> None:
    target = make_target()
    call = GenerateCall(target, PROMPT.input_ids(make_tokenizer()), 8, SAMPLED, 3)
    written = call.run(None).new_ids
    num_hooks = len(target._forward_hooks)

    steps = [replay_plain(call, index) for index in range(8)]
    other = replay_plain(call, 5, given=torch.eye(VOCAB_SIZE)[11] * 1e4)

    assert [step.token_id for step in steps] == written
    assert all(step.noise is not None and step.gap > 0 for step in steps)
    assert other.new_ids == [*written[:5], 11]
    assert replay_plain(call, 8) is None
    assert len(target._forward_hooks) == num_hooks


def test_a_verifier_that_writes_another_text_is_refused_when_sampling() -> None:
    check = make_check()
    check.drafter.generation_config.verifier = "gumbel"

    assert check.run(PROMPT, GREEDY).verdict == "identical"
    with pytest.raises(OptionError, match=r'same text for the same seed, but the drafter\'s is "gumbel"'):
        check.run(PROMPT, SAMPLED)


def test_the_first_difference_of_two_texts() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0
