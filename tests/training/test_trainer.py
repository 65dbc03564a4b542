"""Distillation with the real Trainer: it learns, accumulates gradients, resumes exactly, and counts correctly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EvalPrediction

from tests.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL, example_batch, loss_curve, make_dataset, make_trainer, same, weights
from transformers_falcon_spec import DraftTree, FalconSpecDrafter
from transformers_falcon_spec.drafters.fingerprint import mismatches_of
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError, TrainingError
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.metrics import MAX_RANK, accuracy_metrics, count_ranks, rank_shares
from transformers_falcon_spec.training.objectives import Outcome
from transformers_falcon_spec.training.objectives import falcon as falcon_file
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training

PLAIN = {"use_glancing": False, "feature_noise": 0.0}
NO_DROPOUT = {"recurrent_dropout": 0.0}


@pytest.mark.parametrize("options", [{"block_size": 2}, {"block_size": 3, "recurrence": "token"}, {"block_size": 1}])
def test_the_drafter_learns_and_the_target_stays_as_it_is(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, options, max_steps=40)
    target_before = {name: value.clone() for name, value in trainer.features.target.state_dict().items()}
    before = trainer.evaluate()

    trainer.train()

    after = trainer.evaluate()
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert after["eval_accuracy"] > before["eval_accuracy"]
    assert same(target_before, trainer.features.target.state_dict())


def test_the_log_names_every_term_of_the_loss(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, token_loss_weight=0.5)

    trainer.train()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [4, 8, 12]
    for entry in logged:
        terms = entry["regression"] + 0.5 * (0.9 * entry["divergence"] + 0.1 * entry["cross_entropy"])
        assert entry["loss"] == pytest.approx(terms, rel=1e-3)


def test_terms_are_means_since_the_last_log_whatever_is_evaluated_between(tmp_path: Path) -> None:
    found = []

    for options in ({}, {"eval_strategy": "steps", "eval_steps": 3}, {"eval_on_start": True}):
        trainer = make_trainer(tmp_path, **options)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([entry["cross_entropy"] for entry in logged])

    assert found[0] == found[1] == found[2]


def equal_rows(num_rows: int) -> list[dict[str, list[int]]]:
    """Examples of one length with as many counted rows each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 90, (num_rows, 12), generator=generator)
    return [{"input_ids": row.tolist(), "assistant_mask": [0] * 4 + [1] * 8} for row in ids]


def test_accumulating_two_batches_of_two_is_a_batch_of_four(tmp_path: Path) -> None:
    common = {**PLAIN, "max_steps": 3, "optim": "sgd", "max_grad_norm": 0, "train_sampling_strategy": "sequential"}
    found = []

    for size, num_batches in ((4, 1), (2, 2)):
        trainer = make_trainer(
            tmp_path,
            {"block_size": 1, **NO_DROPOUT},
            equal_rows(12),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=num_batches,
            **common,
        )
        start = weights(trainer)
        trainer.train()
        found.append({name: value - start[name] for name, value in weights(trainer).items()})

    moved = max(value.abs().max().item() for value in found[0].values())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-4 * moved)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train_sampling_strategy": "random", "eval_strategy": "steps", "eval_steps": 3},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    ],
    ids=["by length", "random, evaluating", "accumulating"],
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_weights(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    saving = {**options, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(tmp_path / "whole", {"block_size": 3}, **saving)
    whole.train()
    whole_losses = loss_curve(whole)

    for step in (2, 5, 8):  # five steps an epoch: within the first, at its end, within the second
        resumed = make_trainer(tmp_path / "resumed", {"block_size": 3}, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))

        assert same(weights(whole), weights(resumed))
        assert loss_curve(resumed)[-1] == whole_losses[-1]


def test_each_epoch_reads_every_example_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    orders = []

    for epoch in (0, 1, 0):
        trainer.state.epoch = epoch + 0.4
        orders.append(list(trainer.get_train_dataloader().batch_sampler.sampler))

    assert sorted(orders[0]) == list(range(20))
    assert orders[0] == orders[2] != orders[1]


def test_evaluating_and_decoding_on_the_way_change_nothing(tmp_path: Path) -> None:
    decoding = {"eval_strategy": "steps", "eval_steps": 3, "eval_decode_prompts": 2, "eval_decode_tokens": 6}
    found = []

    for options in ({}, decoding):
        trainer = make_trainer(tmp_path, {"recurrent_dropout": 0.5}, **options)  # dropout draws from the global stream
        trainer.train()
        found.append(weights(trainer))

    assert same(*found)


def test_evaluation_is_repeatable_and_without_reveals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 3})
    monkeypatch.setattr(falcon_file, "reveal", None)  # must not be called

    first, second = trainer.evaluate(), trainer.evaluate()

    names = [name for name in first if "accuracy" in name or "rank" in name or name == "eval_loss"]
    assert len(names) > 3 * MAX_RANK
    assert [first[name] for name in names] == [second[name] for name in names]


def test_evaluation_is_free_of_noise(tmp_path: Path) -> None:
    loud, quiet = (make_trainer(tmp_path, feature_noise=noise).evaluate() for noise in (1.0, 0.0))

    assert loud["eval_loss"] == quiet["eval_loss"]


def test_what_training_draws_depends_on_seed_and_step_and_not_on_the_global_stream(tmp_path: Path) -> None:
    losses = []

    for seed, global_seed, step in ((0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 1, 7)):
        trainer = make_trainer(tmp_path, {"block_size": 3, **NO_DROPOUT}, seed=seed)
        trainer.state.max_steps, trainer.state.global_step = 100, step
        torch.manual_seed(global_seed)
        losses.append(trainer.compute_loss(trainer.model, example_batch()).item())

    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_batches_of_one_step_draw_differently(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 3, **NO_DROPOUT})

    first, second = (trainer.compute_loss(trainer.model, example_batch()).item() for _ in range(2))

    assert first != second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_drafter_of_full_precision_learns_from_a_target_of_another(tmp_path: Path, dtype: torch.dtype) -> None:
    target = make_target(**SMALL)
    drafter = make_drafter(target).train()
    args = DrafterTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = DrafterTrainer(target=target.to(dtype), model=drafter, args=args)

    trainer.compute_loss(drafter, example_batch()).backward()

    assert drafter.dtype == torch.float32
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters() if weight.requires_grad)


def naive_counts(outcome: Outcome, num_offsets: int) -> list[list[int]]:
    """How often the target's best token stood at each rank of the drafter's list, by block offset."""
    counts = [[0] * (MAX_RANK + 1) for _ in range(num_offsets)]
    parts = (outcome.draft_logits.tolist(), outcome.target_logits.tolist(), outcome.block_offsets.tolist())
    for ours, theirs, offset in zip(*parts, strict=True):
        best = theirs.index(max(theirs))
        rank = sum(score > ours[best] for score in ours)
        counts[offset][min(rank, MAX_RANK)] += 1
    return counts


@pytest.mark.parametrize("num_offsets", [1, 2, 3])
def test_ranks_are_counted_by_block_offset(num_offsets: int) -> None:
    logits, target_logits = torch.randn(40, 30), torch.randn(40, 30)
    outcome = Outcome(torch.zeros(()), {}, logits, target_logits, torch.randint(num_offsets, (40,)))

    counts = count_ranks(outcome, num_offsets)

    assert counts[0].tolist() == naive_counts(outcome, num_offsets)


def test_metrics_are_shares_of_the_counts_of_all_batches() -> None:
    counts = torch.zeros(2, 2, MAX_RANK + 1)  # two batches, k = 2
    counts[0, 0, :3] = torch.tensor([3.0, 2.0, 1.0])
    counts[1, 0, MAX_RANK] = 4
    counts[1, 1, 0] = 5

    metrics = accuracy_metrics(EvalPrediction(predictions=counts.numpy(), label_ids=None))

    assert metrics["accuracy"] == pytest.approx(8 / 15)
    assert metrics["accuracy_at_1"] == metrics["rank_0_at_1"] == pytest.approx(0.3)
    assert [metrics[f"rank_{rank}_at_1"] for rank in range(4)] == pytest.approx([0.3, 0.2, 0.1, 0.0])
    assert metrics["accuracy_at_2"] == pytest.approx(1.0)


def test_a_place_that_never_counts_has_share_0() -> None:
    counts = torch.zeros(1, 2, MAX_RANK + 1)
    counts[0, 0, 0] = 1

    metrics = accuracy_metrics(EvalPrediction(predictions=counts.numpy(), label_ids=None))

    assert metrics["accuracy_at_2"] == 0


def test_the_fitted_tree_is_the_best_for_the_measured_ranks_and_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 2}, draft_tree_nodes=9)
    shares = [[0.7, 0.2] + [0.01] * (MAX_RANK - 2), [0.6, 0.1] + [0.02] * (MAX_RANK - 2)]
    measured = {f"eval_rank_{r}_at_{offset}": shares[offset - 1][r] for offset in (1, 2) for r in range(MAX_RANK)}
    monkeypatch.setattr(trainer, "evaluate", lambda: measured)

    tree = trainer.fit_draft_tree()
    trainer.save_model(str(tmp_path / "drafter"))

    assert tree.to_json() == DraftTree.best_first(torch.tensor(shares), 9).to_json()
    assert (len(tree), int(tree.depths.max())) == (9, 2)
    assert FalconSpecDrafter.from_pretrained(tmp_path / "drafter").draft_tree.to_json() == tree.to_json()


def test_a_tree_can_be_fitted_to_a_real_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, draft_tree_nodes=5)

    assert len(trainer.fit_draft_tree()) == 5


def test_where_only_the_loss_is_measured_the_drafter_keeps_its_tree(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, prediction_loss_only=True, eval_decode_prompts=1)

    assert trainer.fit_draft_tree(trainer.evaluate()) == trainer.drafter.draft_tree


def test_the_tree_of_several_evaluation_sets_is_fitted_to_the_mean_of_them(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 1}, draft_tree_nodes=6)
    trainer.eval_dataset = {"maths": trainer.eval_dataset, "chat": make_dataset(4, seed=2)}
    found = trainer.evaluate()

    tree = trainer.fit_draft_tree()

    shares = [rank_shares(found, 1, MAX_RANK, f"eval_{name}") for name in ("maths", "chat")]
    assert not shares[0].equal(shares[1])
    assert tree.to_json() == DraftTree.best_first((shares[0] + shares[1]) / 2, 6).to_json()


@pytest.mark.parametrize("tree", [None, DraftTree.chain(5).to_json()], ids=["none", "chain"])
def test_a_tree_is_kept_if_asked(tmp_path: Path, tree: Any) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 2, "draft_tree": tree}, draft_tree_nodes=0)

    found = trainer.fit_draft_tree()

    assert trainer.drafter.config.draft_tree == tree
    assert found.to_json() == (tree or DraftTree.chain(2).to_json())  # without one, a chain of one block is drafted


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(), target_name_or_path="x/right")
    args = DrafterTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)

    with pytest.raises(DrafterMismatchError, match="Load the target it was trained for: `x/right`"):
        DrafterTrainer(target=make_target(**SMALL), model=drafter, args=args)


def test_a_drafter_remembers_the_target_it_was_trained_for_last_and_its_template(tmp_path: Path) -> None:
    first, other = make_target(**SMALL), make_target(**SMALL, seed=5)
    drafter = make_drafter(first)
    signed = drafter.config.target_fingerprint

    trainer = make_trainer(tmp_path, make=lambda _: drafter, make_target_of_run=lambda: other, max_steps=1)
    assert drafter.config.target_fingerprint == signed  # nothing was trained yet
    trainer.train()

    found = {
        name: [m.name for m in mismatches_of(drafter, target, make_tokenizer(template))]
        for name, target, template in (
            ("first", first, PLAIN_TEMPLATE),
            ("other", other, PLAIN_TEMPLATE),
            ("template", other, MARKED_TEMPLATE),
        )
    }
    assert found == {"first": ["other target"], "other": [], "template": ["wrong template"]}


def test_data_without_anything_to_draft_are_refused_in_words_before_the_first_step(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(6, 20)), "assistant_mask": [1] * 3 + [0] * 11}] * 4  # none that k = 2 can draft
    message = "The training data must hold at least one assistant token that can be drafted"

    with pytest.raises(TrainingError, match=message):
        make_trainer(tmp_path, train_dataset=rows)
    with pytest.raises(TrainingError, match=message.replace("training", "evaluation")):
        make_trainer(tmp_path).evaluate(rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eval_decode_prompts": -1}, "`eval_decode_prompts` must be at least 0"),
        ({"eval_decode_tokens": 0}, "`eval_decode_tokens` must be at least 1, but it is 0"),
        ({"glancing_ratio": 1.5}, r"`glancing_ratio` must lie in 0\.\.1, but it is 1\.5"),
        ({"glancing_ratio": -0.1}, "`glancing_ratio` must lie"),
        ({"draft_tree_nodes": -1}, "`draft_tree_nodes` must be at least 0"),
        ({"remove_unused_columns": True}, r"`remove_unused_columns` must be one of \(False,\), but it is True"),
        ({"label_smoothing_factor": 0.1}, r"`label_smoothing_factor` must be one of \(0, 0\.0\), but it is 0\.1"),
        ({"bf16_full_eval": True}, r"`bf16_full_eval` must be one of \(False,\), but it is True"),
        ({"batch_eval_metrics": True}, r"`batch_eval_metrics` must be one of \(False,\), but it is True"),
        ({"eval_do_concat_batches": False}, r"`eval_do_concat_batches` must be one of \(True,\), but it is False"),
        (
            {"include_for_metrics": ["inputs"]},
            r"`include_for_metrics` must be one of \(\[\],\), but it is \['inputs'\]",
        ),
    ],
)
def test_an_option_out_of_range_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        DrafterTrainingArguments(str(tmp_path), **options)


def test_metrics_of_decoding_have_the_prefix_that_was_given_by_position(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_decode_prompts=1)

    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Test", None, None, "held_out")

    assert "held_out_acceptance_length" in output.metrics
    assert all(name.startswith("held_out_") for name in output.metrics)
