"""The objective of Medusa inside the real Trainer: labels and weights of the heads, and that all of them learn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from tests.drafters.medusa.makers import make_medusa
from tests.drafters.medusa.twin import naive_head
from tests.tiny import make_target
from tests.training.runs import QUIET, SHORT, SMALL, example_batch, make_dataset, same
from tests.training.test_losses import naive_cross_entropy, naive_divergence
from transformers_falcon_spec import LookaheadDrafter, MedusaDrafter
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import ConversationCollator
from transformers_falcon_spec.training.trainer import DrafterTrainer


def make_trainer(folder: Path, drafter: Any = None, target: Any = None, **options: Any) -> DrafterTrainer:
    set_seed(0)
    target = make_target(**SMALL) if target is None else target
    return DrafterTrainer(
        target=target,
        model=(make_medusa(target, num_heads=3) if drafter is None else drafter).train(),
        args=DrafterTrainingArguments(str(folder), **{**QUIET, **SHORT, **options}),
        train_dataset=make_dataset(20),
        eval_dataset=make_dataset(6, seed=1),
        data_collator=ConversationCollator(0),
    )


@torch.no_grad()
def naive_loss(trainer: DrafterTrainer, batch: dict[str, torch.Tensor]) -> tuple[float, list[tuple[int, int]]]:
    """The loss, one head and one token at a time, and the block offset and the target's token of each guess."""
    target, weights = trainer.features.target, trainer.model.state_dict()
    hidden = target.get_decoder()(input_ids=batch["input_ids"])[0]
    logits, total, guesses = target(input_ids=batch["input_ids"]).logits, 0.0, []
    num_heads = trainer.objective.num_offsets
    num_labels = int(batch["assistant_mask"][:, 2:].sum())  # of the first head, which drafts every token
    for head in range(num_heads):
        ours, theirs = [], []
        for row, is_assistant in enumerate(batch["assistant_mask"].tolist()):
            for position in range(len(is_assistant)):
                drafted = (
                    position + 2 + head
                )  # the feature at `position` chose the token after it; the heads name those after that
                if drafted < len(is_assistant) and is_assistant[drafted]:
                    ours.append(naive_head(weights, head, hidden[row, position], trainer.features.head).tolist())
                    theirs.append(logits[row, drafted - 1].tolist())
                    guesses.append((head, theirs[-1].index(max(theirs[-1]))))
        mean = 0.9 * naive_divergence(ours, theirs) + 0.1 * naive_cross_entropy(ours, theirs)
        total += 0.8 ** (head + 1) * mean * len(ours) / num_labels
    return total, guesses


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("num_silent", [0, 3])
def test_each_head_is_compared_with_the_target_where_it_drafts(
    tmp_path: Path, num_silent: int, has_lm_heads: bool
) -> None:
    target = make_target(**SMALL)
    drafter = make_medusa(target, num_heads=3, num_layers=2, has_lm_heads=has_lm_heads)
    trainer, batch = make_trainer(tmp_path, drafter, target), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) >= num_silent

    loss, outcome = trainer.compute_loss(trainer.model, batch, return_outputs=True)

    expected, guesses = naive_loss(trainer, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    found = zip(outcome.block_offsets.tolist(), outcome.target_logits.argmax(-1).tolist(), strict=True)
    assert sorted(found) == sorted(guesses)


def test_a_head_without_anything_to_draft_costs_nothing(tmp_path: Path) -> None:
    trainer, batch = make_trainer(tmp_path), example_batch(1)
    batch = {name: value[:, :4] for name, value in batch.items()}  # three pairs: the third head drafts past the end
    batch["assistant_mask"] = torch.ones_like(batch["assistant_mask"])

    loss, outcome = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    loss.backward()

    assert set(outcome.block_offsets.tolist()) == {0, 1}
    assert outcome.terms["token_loss_at_3"] == 0
    assert all(weight.grad.isfinite().all() for weight in trainer.model.parameters())


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_a_fresh_drafter_learns_with_every_weight_and_the_target_stays_as_it_is(
    tmp_path: Path, has_lm_heads: bool
) -> None:
    target = make_target(**SMALL)
    drafter = MedusaDrafter.from_target(target, num_heads=2, has_lm_heads=has_lm_heads)
    trainer = make_trainer(tmp_path, drafter, target, max_steps=40, weight_decay=0.0)
    target_before = {name: value.clone() for name, value in target.state_dict().items()}
    start = {name: value.clone() for name, value in drafter.state_dict().items()}
    before = trainer.evaluate()

    trainer.train()

    after = trainer.evaluate()
    assert after["eval_loss"] < 0.92 * before["eval_loss"]  # the text is drawn: little of it can be foreseen
    assert all(not value.equal(start[name]) for name, value in drafter.state_dict().items())
    assert same(target_before, target.state_dict())


def test_a_tree_is_fitted_with_a_depth_for_each_head(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, draft_tree_nodes=40)

    tree = trainer.fit_draft_tree()

    assert len(tree) == 40
    assert 1 <= int(tree.depths.max()) <= 3
    assert trainer.model.draft_tree.to_json() == tree.to_json()


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterMismatchError, match="features of size 64"):
        make_trainer(tmp_path, make_medusa(make_target()))


def test_a_drafter_that_has_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    target = make_target(**SMALL)

    with pytest.raises(OptionError, match="but the model is a `LookaheadDrafter`"):
        make_trainer(tmp_path, LookaheadDrafter.from_target(target), target)
