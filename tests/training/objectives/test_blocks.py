"""The objective of DFlash drafters: trained as `generate` runs them, weighted by block offset, all weights learn."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.dflash.makers import from_stock, make_dflash_drafter
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_prompt, make_target
from tests.training.objectives.test_medusa import make_trainer
from tests.training.runs import example_batch, same
from tests.training.test_losses import naive_cross_entropy, naive_divergence
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.objectives.blocks import block_mask, draw_anchors

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}


def dflash_trainer(folder: Path, block_size: int = 4, **options: Any) -> Any:
    target = make_target(**SIZES)
    return make_trainer(folder, peaked_dflash(target, block_size=block_size), target, **options)


def recorded_calls(
    target: Any, drafter: Any, prompt: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
    """The greedy text of stock `generate`, and the anchor's position and the logits of each call of the drafter."""
    calls: list[tuple[int, torch.Tensor]] = []

    def note(_module: Any, _inputs: Any, kwargs: dict[str, torch.Tensor], outputs: Any) -> None:
        anchor = int(kwargs["position_ids"][0, -drafter.config.block_size])
        calls.append((anchor, outputs[0][0, 1:]))

    handle = drafter.register_forward_hook(note, with_kwargs=True)
    text = runs.plain(target, prompt, assistant_model=drafter, speculation_type="dflash").sequences
    handle.remove()
    return text, calls


@pytest.mark.parametrize("block_size", [2, 5])
@torch.no_grad()
def test_blocks_are_filled_in_as_by_stock_generate(tmp_path: Path, block_size: int) -> None:
    trainer = dflash_trainer(tmp_path, block_size)
    target, drafter = trainer.features.target, trainer.model.eval()
    text, calls = recorded_calls(target, drafter, make_prompt())
    ones = torch.ones_like(text)
    pairs = trainer.features({"input_ids": text, "attention_mask": ones, "assistant_mask": ones.bool()})
    anchors = torch.tensor([[anchor for anchor, _ in calls]])

    found = trainer.objective.fill_in(drafter, pairs, anchors)

    assert len(calls) > 5
    for number, (_, expected) in enumerate(calls):
        torch.testing.assert_close(found[0, number], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_loss_is_that_of_each_place_against_the_target(tmp_path: Path) -> None:
    trainer, batch = dflash_trainer(tmp_path, num_anchors=50), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) > 4
    batch["assistant_mask"][0, 9:11] = False
    pairs, target = trainer.features(batch), trainer.features.target

    loss, outcome = trainer.compute_loss(trainer.model, batch, return_outputs=True)

    logits, total, weights = target(batch["input_ids"]).logits, 0.0, 0.0
    for row, is_assistant in enumerate(batch["assistant_mask"].tolist()):
        anchors = [position for position in range(1, 13) if is_assistant[position + 1]]  # an assistant token follows
        states = trainer.objective.fill_in(trainer.model, pairs, torch.tensor([anchors, anchors]))[row]
        for number, anchor in enumerate(anchors):
            for offset in range(1, 4):
                if anchor + offset < 14 and is_assistant[anchor + offset]:
                    ours = [target.lm_head(states[number, offset - 1]).tolist()]
                    theirs = [logits[row, anchor + offset - 1].tolist()]
                    weight = math.exp(-(offset - 1) / 2)
                    total += weight * (0.9 * naive_divergence(ours, theirs) + 0.1 * naive_cross_entropy(ours, theirs))
                    weights += weight
    assert loss.item() == pytest.approx(total / weights, rel=1e-4)
    assert set(outcome.block_offsets.tolist()) == {0, 1, 2}


def test_it_learns_with_every_weight_and_the_target_stays_as_it_is(tmp_path: Path) -> None:
    trainer = dflash_trainer(tmp_path, max_steps=40, weight_decay=0.0)
    target_before = {name: value.clone() for name, value in trainer.features.target.state_dict().items()}
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    before = trainer.evaluate()

    trainer.train()

    after = trainer.evaluate()
    assert after["eval_loss"] < 0.92 * before["eval_loss"]
    assert all(not value.equal(start[name]) for name, value in trainer.model.state_dict().items())
    assert same(target_before, trainer.features.target.state_dict())
    assert "eval_accuracy_at_3" in after


def test_anchors_stand_before_tokens_of_the_assistant_and_differ() -> None:
    is_counted = torch.rand(5, 30, generator=torch.Generator().manual_seed(0)) < 0.4
    is_counted[3] = False
    is_counted[4, :3] = True

    for most in (3, 100):
        anchors, is_anchor = draw_anchors(is_counted, most, torch.Generator().manual_seed(1))
        for row in range(5):
            can_start = set(is_counted[row].nonzero()[:, 0].tolist()) - {0}
            real = anchors[row][is_anchor[row]].tolist()
            assert len(set(real)) == len(real) == min(most, len(can_start))
            assert set(real) <= can_start
            assert set(anchors[row][~is_anchor[row]].tolist()) <= {1}


def test_which_anchors_are_drawn_depends_on_the_generator_alone() -> None:
    is_counted = torch.ones(2, 40, dtype=torch.bool)

    first, again, other = (
        draw_anchors(is_counted, 4, torch.Generator().manual_seed(s))[0].tolist() for s in (0, 0, 1)
    )

    assert first == again != other


def test_a_block_sees_the_text_before_its_anchor_and_itself() -> None:
    mask = block_mask(torch.tensor([[3, 1], [2, 4]]), 5, 2)

    for row, anchors in enumerate([[3, 1], [2, 4]]):
        for query in range(4):
            expected = [key < anchors[query // 2] for key in range(5)] + [key // 2 == query // 2 for key in range(4)]
            assert mask[row, query].tolist() == expected


@pytest.mark.parametrize("num_tokens", [2, 14])
def test_a_batch_in_which_no_block_can_start_costs_nothing(tmp_path: Path, num_tokens: int) -> None:
    trainer, batch = dflash_trainer(tmp_path), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) == 1  # what follows the first token
    batch = {name: values[:, :num_tokens] for name, values in batch.items()}

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    assert loss == 0  # as a part of a step; the trainer reads another row in its place
    assert all(weight.grad is None or not weight.grad.any() for weight in trainer.model.parameters())


def test_it_has_no_draft_tree(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs a drafter with a static draft tree"):
        dflash_trainer(tmp_path).fit_draft_tree()


def test_no_anchor_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`num_anchors` must be at least 1, but it is 0"):
        dflash_trainer(tmp_path, num_anchors=0)


def test_a_drafter_of_this_packages_loop_learns_the_same_and_decodes_in_it(tmp_path: Path) -> None:
    target = make_target(**SIZES)
    stock = peaked_dflash(target)
    own = from_stock(copy.deepcopy(stock), target)
    decoding = {"eval_decode_prompts": 2, "eval_decode_tokens": 8, "max_steps": 3}
    trainers = [make_trainer(tmp_path / type(each).__name__, each, target, **decoding) for each in (stock, own)]

    for trainer in trainers:
        trainer.train()
    metrics = [trainer.evaluate() for trainer in trainers]

    assert metrics[1]["eval_loss"] == pytest.approx(metrics[0]["eval_loss"])
    assert all("eval_acceptance_length" in each for each in metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal_layer_types": ["full_attention"]}, "must have a `causal_layer_types` of None to be trained"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"must have a `layer_types` of \['full_attention', 'full",
        ),
        ({"output_multiplier": 0.5}, r"`output_multiplier` of 1\.0 to be trained, but that of this one is 0\.5"),
        (
            {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 9},
            "`selector_rank` of 0 to be trained, but that of this one is 4",
        ),
    ],
    ids=["causal", "a window", "scaled", "DFlash2"],
)
def test_a_converted_drafter_that_training_does_not_compute_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = make_target(**SIZES)

    with pytest.raises(OptionError, match=message):
        make_trainer(tmp_path, make_dflash_drafter(target, **options), target)
