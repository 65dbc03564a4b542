"""Rejection rules where both models are almost sure: no call ends in an error, and every text keeps its probability."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.easyspec.kinds import make_drafter as make_easyspec
from tests.drafters.medusa.makers import make_medusa
from tests.reference import ScriptedDraws, every_branch
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree, LayerParallelDrafter, SpeculationConfig

RULES = ("recursive_rejection", "traversal")
TREE = DraftTree.from_lists([-1, 0, 0, 0, 1, 1]).to_json()
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
    "medusa": lambda target: make_medusa(target, num_heads=2),
    "easyspec": make_easyspec,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("falcon", "medusa") else pytest.param(kind, marks=pytest.mark.families) for kind in DRAFTERS],
)
def test_no_rule_fails_where_fewer_tokens_than_siblings_have_probability(kind: str, rule: str) -> None:
    target = make_target()
    drafter = DRAFTERS[kind](target)
    drafter.generation_config = SpeculationConfig(verifier=rule, draft_tree=TREE)

    for temperature in (0.03, 0.003):
        for seed in range(2):
            torch.manual_seed(seed)
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 12}
            out = target.generate(
                make_prompt(6, seed), assistant_model=drafter, return_dict_in_generate=True, **options
            )
            assert out.sequences.shape == (1, 18)
            assert out.speculation.num_drafted > 0


class LikelyDraws(ScriptedDraws):
    """Leaves out what hardly ever happens, so that there are few branches."""

    def categorical(self, probs: Tensor) -> Tensor:
        """One index for the only row of `probs`."""
        return super().categorical(probs.where(probs > 1e-5, 0))


def drawn_by(draws: list[ScriptedDraws]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """As `draw_distinct`, but every draft is a branch, too."""

    def draw(probs: Tensor, noise: Tensor, num: int) -> Tensor:
        assert noise.shape == probs.shape
        rows = []
        for row in probs.double().clone():
            taken: list[int] = []
            for _ in range(num):
                row[taken] = 0
                free = [token for token in range(len(row)) if token not in taken]
                taken.append(int(draws[-1].categorical(row[None] / row.sum())) if row.any() else free[0])
            rows.append(taken)
        return torch.tensor(rows)

    return draw


def probs_of_texts(target: Any, prompt: Tensor, temperature: float, num: int) -> Mapping[tuple[int, ...], float]:
    """What the target alone writes."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num):
        longer = {}
        for text, prob in probs.items():
            logits = target(torch.cat([prompt, torch.tensor([text], dtype=torch.long)], dim=-1)).logits[0, -1]
            for token, probability in enumerate(torch.softmax(logits.float() / temperature, dim=-1).tolist()):
                longer[(*text, token)] = prob * probability
        probs = {text: prob for text, prob in longer.items() if prob > 1e-9}
    return probs


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.2, 0.03])
@pytest.mark.parametrize("rule", RULES)
def test_every_text_of_a_sharp_pair_keeps_its_probability(
    rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt, running = make_target(vocab_size=5).double(), torch.tensor([[3, 4, 1, 2]]), [LikelyDraws()]
    other = deepcopy(target)
    other.lm_head.weight.mul_(0.9)
    other.lm_head.weight[0].mul_(1.3)
    drafter = LayerParallelDrafter.wrap(other, target)
    tree = DraftTree.from_lists([-1, 0, 0, 1]).to_json()
    drafter.generation_config = SpeculationConfig(verifier=rule, draft_tree=tree)
    monkeypatch.setattr("transformers_falcon_spec.generation.sequence_batch.GeneratorDraws", lambda: running[-1])
    monkeypatch.setattr("transformers_falcon_spec.drafters.tree_drafting.proposing.draw_distinct", drawn_by(running))
    num_accepted = []

    def write(draws: ScriptedDraws) -> tuple[int, ...]:
        draws.__class__ = LikelyDraws
        running.append(draws)
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 3}
        out = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
        num_accepted.append(out.speculation.num_accepted)
        return tuple(out.sequences[0, 4:].tolist())

    found: dict[tuple[int, ...], float] = {}
    for text, prob in every_branch(write):
        found[text] = found.get(text, 0.0) + prob

    expected = probs_of_texts(target, prompt, temperature, 3)
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)
    assert all(found.get(text, 0.0) == pytest.approx(prob, abs=1e-4) for text, prob in expected.items())
    assert max(num_accepted) > 0
