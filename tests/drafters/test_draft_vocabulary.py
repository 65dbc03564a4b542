"""Short lists of tokens: what is drafted over one is what all tokens would give without the others, and texts stay what they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import runs
from tests.drafters.dflash.makers import make_dflash_drafter
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.texts import Text
from tests.every_drafter import every_drafter
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from tests.training.runs import example_batch, make_trainer
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.tree_drafting.proposing import PairGenerator
from transformers_falcon_spec.errors import CheckpointError, OptionError
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.target import Target

LIST = sorted(range(1, VOCAB_SIZE, 3))
TRANSITION = {
    "block_size": 3,
    "recurrent_dropout": 0.0,
    "recurrence": "token",
    "transition_rank": 8,
    "transition_size": 8,
}


def make_falcon(target: Any, **options: Any) -> FalconSpecDrafter:
    drafter = make_drafter(target, **{"block_size": 3, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in drafter.recurrence.parameters():
            weight.normal_(std=0.25, generator=generator)
        if drafter.config.transition_rank is not None:
            drafter.transition.after.weight.normal_(std=3.0, generator=generator)
    return drafter


MAKERS: dict[str, Callable[..., Any]] = {
    "falcon": make_falcon,
    "eagle-1": lambda target, **options: make_eagle(target, "eagle-1", **options),
    "medusa": lambda target, **options: make_medusa(target, has_lm_heads=False, **options),
    "dflash": make_dflash_drafter,
}


KINDS = [*MAKERS, "falcon with a transition"]


def make_listed(kind: str, target: Any, **options: Any) -> Any:
    drafter = MAKERS[kind](target, **options)
    drafter.set_draft_vocabulary(LIST)
    return drafter


def make_falcon_of_list(target: Any) -> FalconSpecDrafter:
    drafter = make_falcon(target, draft_vocab_size=len(LIST), **TRANSITION)
    drafter.set_draft_vocabulary(LIST)
    return drafter


def with_tables_of(listed: FalconSpecDrafter, target: Any) -> FalconSpecDrafter:
    """A drafter of all tokens that does with those of the list what `listed` does."""
    whole = make_falcon(target, **TRANSITION)
    weights = listed.state_dict()
    before = weights["transition.before.weight"]
    after = weights["transition.after.weight"]
    weights["transition.before.weight"] = (
        before[-1:].repeat(VOCAB_SIZE, 1).index_copy(0, torch.tensor(LIST), before[:-1])
    )
    weights["transition.after.weight"] = (
        torch.zeros(VOCAB_SIZE, after.shape[1]).to(after).index_copy(0, torch.tensor(LIST), after)
    )
    whole.load_state_dict({name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")})
    return whole


class _Masked(Target):
    """A target of whose logits those outside the list are taken away; its drafters draft over all tokens."""

    def head(self, features: Tensor, is_scaled: bool = True, rows: Any = None) -> Tensor:
        logits = super().head(features, is_scaled, rows)
        outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        outside[LIST] = False
        return logits.masked_fill(outside, -1e9)


def noise(row: int, depth: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * row + depth)
    return torch.rand(VOCAB_SIZE, generator=generator, dtype=torch.double).add_(0.01)


BUDGETS = {
    "the likeliest": DraftBudget((100,), 40),
    "with noise": DraftBudget((100,), 40, temperature=0.8, noise=noise),
    "drawn": DraftBudget((100,), 40, temperature=0.8),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("kind", "is_grown"),
    [(kind, is_grown) for kind in KINDS for is_grown in (False, True) if not (is_grown and kind == "medusa")],
)
@torch.no_grad()
def test_a_draft_over_a_list_is_one_over_all_tokens_without_the_others(kind: str, is_grown: bool, budget: str) -> None:
    target = make_target(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2).double()
    if kind == "falcon with a transition":
        listed = make_falcon_of_list(target)
        whole = with_tables_of(listed, target)
    else:
        listed, whole = make_listed(kind, target), MAKERS[kind](target)

    drafts = []
    for drafter, view in ((listed, Target), (whole, _Masked)):
        drafter.generation_config = SpeculationConfig(dynamic_tree=is_grown or None, num_tree_nodes=12, tree_top_k=4)
        read = view(target, drafter.feature_layers)
        generator = drafter.candidate_generator(read, 1000, torch.Generator().manual_seed(0))
        text = Text(width=read.feature_dim)
        generator.commit(text.more(9))
        drafts.append(generator.propose(BUDGETS[budget]))

    assert drafts[0].token_ids.equal(drafts[1].token_ids)
    assert drafts[0].parents.equal(drafts[1].parents)
    assert len(drafts[0].token_ids[0]) > 3
    assert set(drafts[0].token_ids[0, 1:].tolist()) <= set(LIST)


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own_and_holds_tokens_that_cannot_be_drafted(kind: str, mode: dict[str, Any]) -> None:
    target = make_target(seed=7).double()
    drafter = make_falcon_of_list(target) if kind == "falcon with a transition" else make_listed(kind, target)

    pair = runs.both(target, drafter, max_new_tokens=30, **mode)
    knowing = runs.informed(target, drafter, max_new_tokens=40, **mode)

    pair.assert_equal(is_kept=False)
    knowing.assert_equal()
    assert pair.stats.num_drafted > 0
    assert not set(pair.drafted.sequences[0, 12:].tolist()) <= set(LIST)


@pytest.mark.parametrize("changed", ["target", "list"])
def test_work_that_is_repeated_drafts_by_the_list_and_the_head_as_they_are_now(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(seed=7).double()
    drafts: list[list[int]] = []
    propose = PairGenerator.propose

    def recorded(self: PairGenerator, budget: DraftBudget) -> Any:
        draft = propose(self, budget)
        if draft is not None:
            drafts.append(draft.token_ids[0].tolist())
        return draft

    monkeypatch.setattr(PairGenerator, "propose", recorded)

    def drafted_by(drafter: Any) -> list[list[int]]:
        drafts.clear()
        drafter.generation_config = SpeculationConfig(capture=True, tune=False)
        runs.both(target, drafter).assert_equal(is_kept=False)
        return list(drafts)

    drafter = make_listed("eagle-1", target)
    before = drafted_by(drafter)
    if changed == "target":
        with torch.no_grad():
            target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    else:
        drafter.set_draft_vocabulary([token - 1 for token in LIST])

    after = drafted_by(drafter)

    anew = make_listed("eagle-1", target)
    anew.set_draft_vocabulary(drafter.draft_token_ids.tolist())
    assert after == drafted_by(anew)
    assert after[0] != before[0]


def test_ids_lead_to_the_list_and_back() -> None:
    drafter = make_falcon_of_list(make_target())

    assert drafter.draft_token_ids is not None
    assert drafter.draft_token_ids.tolist() == LIST
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == [
        LIST.index(token) if token in LIST else len(LIST) for token in range(VOCAB_SIZE)
    ]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_list_is_saved_with_its_drafter(kind: str, tmp_path: Path) -> None:
    drafter = make_listed(kind, make_target())

    drafter.save_pretrained(tmp_path)
    loaded = type(drafter).from_pretrained(tmp_path)

    assert loaded.draft_token_ids.tolist() == LIST
    assert loaded.config.draft_vocab_size == len(LIST)


def test_tables_of_a_list_are_as_long_as_it(tmp_path: Path) -> None:
    drafter = make_falcon_of_list(make_target())

    assert len(drafter.transition.before.weight) == len(LIST) + 1
    assert len(drafter.transition.after.weight) == len(LIST)
    assert not any(VOCAB_SIZE in weight.shape for weight in drafter.parameters())


@pytest.mark.parametrize("offset", [-5, 200])
def test_a_broken_list_is_found_when_loading(tmp_path: Path, offset: int) -> None:
    make_listed("eagle-1", make_target()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["d2t"][7] += offset
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"`d2t` of .* must lead to the 32 tokens that `t2d` marks"):
        EagleDrafter.from_pretrained(tmp_path)


def test_a_drafter_with_tables_over_all_tokens_takes_no_list() -> None:
    drafter = make_falcon(make_target(), **TRANSITION)

    with pytest.raises(OptionError, match=r"must be set before it is trained, for `transition\.before\.weight`"):
        drafter.set_draft_vocabulary(LIST)


def test_heads_of_their_own_and_a_list_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="`has_lm_heads` must be False, but it is True"):
        MedusaDrafter.from_target(make_target(), draft_vocab_size=20, has_lm_heads=True)


@torch.no_grad()
def test_training_compares_distributions_over_the_list_and_counts_others_as_missed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make=make_falcon_of_list, use_glancing=False, feature_noise=0.0)
    pairs = trainer.features(example_batch())
    generator = torch.Generator().manual_seed(0)

    learning = trainer.objective(trainer.model.train(), pairs, generator.manual_seed(0), 0.0)
    counted = trainer.objective(trainer.model.eval(), pairs, generator.manual_seed(0), 0.0)

    truth = trainer.features.head(pairs.labels[pairs.is_counted])
    assert learning.draft_logits.shape[-1] == learning.target_logits.shape[-1] == len(LIST)
    torch.testing.assert_close(learning.target_logits, truth[:, LIST])
    torch.testing.assert_close(counted.target_logits, truth)
    torch.testing.assert_close(counted.draft_logits[:, LIST], learning.draft_logits)
    others = [token for token in range(VOCAB_SIZE) if token not in LIST]
    assert counted.draft_logits[:, others].eq(-torch.inf).all()
    assert learning.loss.equal(counted.loss)


@pytest.mark.parametrize("kind", ["eagle-1", "medusa", "falcon"])
def test_a_drafter_with_a_list_learns(kind: str, tmp_path: Path) -> None:
    makers: dict[str, Any] = {"eagle-1": EagleDrafter, "medusa": MedusaDrafter, "falcon": FalconSpecDrafter}
    options = {"transition_rank": 8} if kind == "falcon" else {}

    def make(target: Any) -> Any:
        drafter = makers[kind].from_target(target, draft_vocab_size=60, **options)
        drafter.set_draft_vocabulary(range(30, 90))
        return drafter

    trainer = make_trainer(tmp_path, make=make, max_steps=40)
    rows = trainer.train_dataset
    before = trainer.evaluate(rows)

    trainer.train()

    after = trainer.evaluate(rows)
    assert after["eval_loss"] < 0.9 * before["eval_loss"]
    assert after["eval_accuracy"] > before["eval_accuracy"]
    out = trainer.features.target.generate(make_prompt(), assistant_model=trainer.model.eval(), max_new_tokens=6)
    assert out.shape == (1, 18)


@pytest.mark.parametrize("kind", ["falcon", "eagle-3", "medusa", "dflash", "layers in parallel", "diffusion, trees"])
def test_tokens_that_a_target_reads_but_cannot_write_are_not_drafted(kind: str) -> None:
    target = make_target()
    target.lm_head = torch.nn.Linear(64, 60, bias=False)  # as that of an Apertus 1.5 that writes text alone
    torch.nn.init.normal_(target.lm_head.weight, std=0.3)
    drafter = every_drafter(kind, target)

    runs.both(target, drafter, do_sample=True).assert_equal(is_kept=False)
    runs.informed(target, drafter, do_sample=True).assert_equal()
