"""Distilling a small language model: what it is compared with, that all of it learns, and what it has not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_target
from tests.training.objectives.test_medusa import make_trainer
from tests.training.runs import SMALL, example_batch, same
from tests.training.test_losses import naive_cross_entropy, naive_divergence
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.errors import DrafterMismatchError, TrainingError


def draft_model(target: Any) -> Any:
    """One that starts afresh."""
    return make_draft_model(target, num_hidden_layers=1, intermediate_size=40)


def test_every_token_of_the_assistant_is_compared_with_the_target(tmp_path: Path) -> None:
    target, batch = make_target(**SMALL), example_batch(2)
    trainer = make_trainer(tmp_path, draft_model(target), target)
    batch["attention_mask"][1, 10:] = 0
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) > 3
    batch["assistant_mask"] = batch["assistant_mask"] & batch["attention_mask"].bool()

    loss, outcome = trainer.compute_loss(trainer.model, batch, return_outputs=True)

    ours, theirs = [], []
    for row, length in ((0, 14), (1, 10)):
        with torch.no_grad():
            logits = [model(batch["input_ids"][row : row + 1, :length]).logits[0] for model in (trainer.model, target)]
        ours += logits[0][3 : length - 1].tolist()  # the logits before each token from the fifth on
        theirs += logits[1][3 : length - 1].tolist()
    expected = 0.9 * naive_divergence(ours, theirs) + 0.1 * naive_cross_entropy(ours, theirs)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(outcome.draft_logits, torch.tensor(ours), rtol=1e-4, atol=1e-5)


def test_it_learns_with_every_weight_and_the_target_stays_as_it_is(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    model = draft_model(target)
    trainer = make_trainer(tmp_path, model, target, max_steps=40, weight_decay=0.0)
    target_before = {name: value.clone() for name, value in target.state_dict().items()}
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = trainer.evaluate()

    trainer.train()

    after = trainer.evaluate()
    assert after["eval_loss"] < 0.92 * before["eval_loss"]  # the text is drawn: little of it can be foreseen
    assert after["eval_accuracy_at_1"] > before["eval_accuracy_at_1"]
    assert all(not value.equal(start[name]) for name, value in model.state_dict().items())
    assert same(target_before, target.state_dict())


def test_a_model_that_is_the_target_has_nothing_to_learn(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    trainer = make_trainer(tmp_path, make_draft_model(target, num_hidden_layers=2), target)

    metrics = trainer.evaluate()

    assert metrics["eval_accuracy_at_1"] == 1


def test_it_has_no_draft_tree(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    trainer = make_trainer(tmp_path, draft_model(target), target)

    with pytest.raises(TrainingError, match="needs a drafter with a static draft tree"):
        trainer.fit_draft_tree()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DrafterMismatchError, match="must have the target's vocabulary of size 97, but it has one of size 50"
    ):
        make_trainer(tmp_path, make_target(vocab_size=50), make_target())
