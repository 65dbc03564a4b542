"""The objectives of Eagle inside the real Trainer: both versions learn, and the loss is that of plain loops."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import VOCAB_SIZE
from tests.tiny import make_eagle, make_prompt, with_list
from tests.training.runs import example_batch, large_features, make_dataset, make_trainer
from transformers_falcon_spec import EagleDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import count_said, most_frequent
from transformers_falcon_spec.training.metrics import MAX_RANK, count_ranks
from transformers_falcon_spec.training.trainer import DrafterTrainer

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "eagle-1": {},
    "eagle-3": {"version": 3, "feature_layers": (0, 1, -1), "draft_ids": list(range(0, 96, 2))},
    "eagle-3.1": {"version": 3, "fc_norm": True, "norm_output": True, "qkv_bias": True},
    "speculators": {"version": 3, "norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": 60},
}


FEW = {"version": 3, "draft_ids": [5, 6, 7, 8]}  # fewer than the ranks that are counted


def trainer_of(folder: Path, kind: str, make: Any = make_eagle, **options: Any) -> DrafterTrainer:
    return make_trainer(folder, KINDS[kind], make=make, **{"ttt_steps": STEPS, **options})


@pytest.mark.parametrize(
    "kind", [kind if kind == "eagle-3" else pytest.param(kind, marks=pytest.mark.training) for kind in KINDS]
)
def test_the_drafter_learns(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, kind, partial(with_list, EagleDrafter.from_target), max_steps=40)
    rows = trainer.train_dataset  # answers of a random target to other prompts follow from nothing
    before = trainer.evaluate(rows)

    trainer.train()

    after = trainer.evaluate(rows)
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert after["eval_accuracy"] > before["eval_accuracy"]
    num_offsets = 1 if kind == "eagle-1" else STEPS
    assert f"eval_accuracy_at_{num_offsets}" in after
    assert f"eval_accuracy_at_{num_offsets + 1}" not in after


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_every_weight_and_the_target_has_none(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, kind)

    trainer.compute_loss(trainer.model, example_batch()).backward()

    missing = [
        name for name, weight in trainer.model.named_parameters() if weight.grad is None or not weight.grad.any()
    ]
    assert not missing
    assert all(weight.grad is None for weight in trainer.features.target.parameters())


def test_version_1_sees_noise_in_training_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "eagle-1", feature_noise=0.25)
    clean, seen = trainer.features(example_batch()).features, []
    trainer.model.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[1]))

    for mode in (True, False):
        trainer.compute_loss(trainer.model.train(mode), example_batch())

    assert 0.2 < (seen[0] - clean).abs().max() <= 0.25 + 1e-6
    assert seen[1].equal(clean)


def naive_loss(trainer: DrafterTrainer, batch: dict[str, Tensor], decay: float) -> tuple[float, list[float]]:
    """The training-time test one row, step and position at a time; labels are found by the index of their token.

    The loss is the mean over the text's tokens; the mean of each step is that over its guesses.
    """
    drafter, target = trainer.model, trainer.features.target
    pairs = trainer.features(batch)
    states = drafter(pairs.token_embeds, pairs.features, STEPS).states
    truth = target(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    ids = drafter.draft_token_ids.tolist() if drafter.config.has_own_vocabulary else list(range(truth.shape[-1]))
    total, means = 0.0, []
    num_tokens = int(batch["assistant_mask"][:, 2:].sum())
    for step in range(STEPS):
        losses = []
        for row in range(len(states)):
            for position in range(states.shape[2]):
                token = position + step + 2  # what the chain guesses here
                if token >= batch["input_ids"].shape[1] or not batch["assistant_mask"][row, token]:
                    continue
                expected = truth[row, token - 1]
                if int(expected.argmax()) not in ids:
                    continue
                expected = expected[ids].softmax(-1)
                found = drafter.draft_logits(states[row, step, position]).softmax(-1)
                losses.append(float((expected * (expected.log() - found.log())).sum()))
        means.append(sum(losses) / max(len(losses), 1))
        total += decay**step * sum(losses) / num_tokens
    return total, means


@pytest.mark.parametrize("kind", ["eagle-3", "eagle-3.1", "speculators"])
@torch.no_grad()
def test_the_loss_is_that_of_loops_over_steps_and_positions(tmp_path: Path, kind: str) -> None:
    trainer = trainer_of(tmp_path, kind, ttt_decay=0.5)
    batch = example_batch()
    batch["attention_mask"][1, 11:] = 0
    batch["assistant_mask"][1, 11:] = False
    batch["assistant_mask"][2, 7:9] = False  # two answers

    loss, outcome = trainer.compute_loss(trainer.model, batch, return_outputs=True)

    expected, means = naive_loss(trainer, batch, decay=0.5)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    terms = [float(outcome.terms[f"divergence_at_{step}"]) for step in (1, 2, 3)]
    assert terms == pytest.approx(means, rel=1e-4)


@torch.no_grad()
def test_evaluation_counts_tokens_that_cannot_be_drafted_as_missed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "eagle-3")
    trainer.model.eval()

    _, outcome = trainer.compute_loss(trainer.model, example_batch(), return_outputs=True)

    best, can_be_drafted = outcome.target_logits.argmax(-1), trainer.model.t2d
    is_lost = ~can_be_drafted[best]
    assert outcome.draft_logits.shape == outcome.target_logits.shape == (len(best), 97)
    assert outcome.draft_logits[:, ~can_be_drafted].eq(-torch.inf).all()
    counts = count_ranks(outcome, STEPS)
    assert counts.sum() == len(best)
    assert 0 < int(is_lost.sum()) <= int(counts[0, :, -1].sum())
    assert torch.bincount(outcome.block_offsets).tolist() == [30, 30, 30]  # tokens 4 to 13 of three rows


@torch.no_grad()
def test_ranks_beyond_a_small_draft_vocabulary_hold_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FEW, make=make_eagle, ttt_steps=STEPS)
    trainer.model.eval()
    _, outcome = trainer.compute_loss(trainer.model, example_batch(30), return_outputs=True)
    can_be_drafted = trainer.model.t2d[outcome.target_logits.argmax(-1)]

    counts = count_ranks(outcome, STEPS)[0]

    assert counts[:, :4].sum() == can_be_drafted.sum()
    assert counts[:, 4:MAX_RANK].sum() == 0
    assert counts[:, MAX_RANK].sum() == (~can_be_drafted).sum() > 0


def test_a_tree_is_no_wider_than_the_draft_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(
        tmp_path,
        FEW,
        make=make_eagle,
        ttt_steps=2,
        draft_tree_nodes=30,
    )
    measured = {f"eval_rank_{rank}_at_{offset}": 0.0 for rank in range(MAX_RANK) for offset in (1, 2)}
    monkeypatch.setattr(trainer, "evaluate", lambda: measured)

    tree = trainer.fit_draft_tree()

    assert (len(tree), int(tree.ranks.max())) == (1 + 4 + 4 * 4, 3)
    target = trainer.features.target
    out = target.generate(make_prompt(), assistant_model=trainer.model.eval(), max_new_tokens=6, do_sample=False)
    assert out.shape == (1, 18)


def test_the_most_frequent_tokens_are_those_of_the_assistant(tmp_path: Path) -> None:
    dataset = make_dataset(12)
    counts: dict[int, int] = dict.fromkeys(range(97), 0)
    for example in list(dataset):
        for token, said in zip(example["input_ids"], example["assistant_mask"], strict=True):
            counts[token] += int(said)

    said = count_said(list(dataset), 97)
    found = most_frequent(said, 10)

    assert found == sorted(sorted(counts, key=lambda token: (-counts[token], token))[:10])
    assert most_frequent(said, 97) == list(range(97))
    with pytest.raises(OptionError, match="must have 1 to 97 tokens, but 98 are asked for"):
        most_frequent(said, 98)


@pytest.mark.parametrize("options", [{"ttt_steps": 0}, {"ttt_decay": 0.0}, {"ttt_decay": 1.5}])
def test_steps_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"`ttt_steps` must be at least 1|`ttt_decay` must lie above 0 and up to 1"):
        DrafterTrainingArguments(str(tmp_path), use_cpu=True, **options)


@torch.no_grad()
def test_training_of_the_first_version_starts_close_to_uniform_where_features_are_large(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make=EagleDrafter.from_target, make_target_of_run=large_features)

    _loss, outcome = trainer.compute_loss(trainer.model, example_batch(), return_outputs=True)

    assert outcome.terms["cross_entropy"].item() == pytest.approx(math.log(VOCAB_SIZE), abs=0.3)
