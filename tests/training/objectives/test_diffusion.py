"""The objective of diffusion drafters: trained as they draft, unable to see later tokens, all weights learn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.diffuspec.naive_model import sees
from tests.drafters.diffuspec.stand_ins import MASK, logits_behind, make_diffusion
from tests.tiny import make_target
from tests.training.objectives.test_medusa import make_trainer
from tests.training.runs import SMALL, example_batch, loss_curve, same
from tests.training.test_losses import naive_cross_entropy, naive_divergence
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.drafters.diffuspec.drafter import DenoisedTexts
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.training.objectives.blocks import DiffusionObjective, packed_blocks

SHIFTS = [1, 0]
ANCHORS = torch.tensor([[5, 2, 12], [9, 4, 1]])


def trainer_of(folder: Path, shift: int = 1, **options: Any) -> Any:
    target = make_target(**SMALL)
    drafter = DiffusionDrafter.from_target(target, logits_shift=shift, block_size=4)
    return make_trainer(folder, drafter, target, **options)


@pytest.mark.parametrize("shift", SHIFTS)
@torch.no_grad()
def test_blocks_are_filled_in_as_in_a_draft(tmp_path: Path, shift: int) -> None:
    trainer, batch = trainer_of(tmp_path, shift), example_batch(2)
    drafter, pairs, anchors = trainer.model.eval(), trainer.features(batch), ANCHORS

    inputs, sources = trainer.objective.packed(pairs.input_ids, anchors)
    everything = torch.ones_like(inputs["token_ids"], dtype=torch.bool)
    logits = drafter(**inputs, kept=everything)

    for row, its_anchors in enumerate(anchors.tolist()):
        for number, anchor in enumerate(its_anchors):
            text = batch["input_ids"][row, : anchor + 1]
            texts = DenoisedTexts(drafter, 1, 64)
            drafted = logits_behind(texts, text, 4)[..., : drafter.config.vocab_size]
            found = logits[sources[row, number]]
            torch.testing.assert_close(found, drafted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_packed_mask_is_that_of_each_block_alone(shift: int) -> None:
    anchors, num_tokens, num_masks = ANCHORS, 14, 4 - shift

    inputs, _ = packed_blocks(torch.zeros(2, num_tokens, dtype=torch.long), anchors, num_masks, shift, MASK)

    num_slots = num_tokens + anchors.shape[1] * num_masks
    for row in range(2):
        for query in range(num_slots):
            block, offset = divmod(query - num_tokens, num_masks)
            for key in range(num_slots):
                if query < num_tokens:  # text
                    expected = key <= query
                else:  # a mask: as the only block behind its text
                    committed = int(anchors[row, block]) + 1
                    key_block, key_offset = divmod(key - num_tokens, num_masks)
                    position = key if key < num_tokens else committed + key_offset
                    is_there = position < committed if key < num_tokens else key_block == block
                    expected = is_there and sees("prefix_causal", committed + offset, position, committed, None)
                assert bool(inputs["allowed"][row, query, key]) == expected
        assert inputs["positions"][row, num_tokens:].tolist() == [
            int(anchor) + 1 + offset for anchor in anchors[row] for offset in range(num_masks)
        ]
    assert (inputs["token_ids"][:, num_tokens:] == MASK).all()


@torch.no_grad()
def test_no_row_of_a_block_sees_text_behind_its_anchor(tmp_path: Path) -> None:
    trainer, batch, anchors = trainer_of(tmp_path), example_batch(2), ANCHORS

    def drafted(ids: torch.Tensor) -> torch.Tensor:
        inputs, sources = trainer.objective.packed(ids, anchors)
        everything = torch.ones_like(inputs["token_ids"], dtype=torch.bool)
        return trainer.model.eval()(**inputs, kept=everything)[sources]

    before = drafted(batch["input_ids"])
    for position in range(14):
        ids = batch["input_ids"].clone()
        ids[:, position] = (ids[:, position] + 1) % 90
        differs = (drafted(ids) != before).any(-1)
        for row in range(2):
            for number, anchor in enumerate(anchors[row].tolist()):
                assert differs[row, number].all() == differs[row, number].any() == (position <= anchor)


@pytest.mark.parametrize("shift", SHIFTS)
@torch.no_grad()
def test_the_loss_is_that_of_each_place_and_of_the_clean_text(tmp_path: Path, shift: int) -> None:
    trainer, batch = trainer_of(tmp_path, shift, num_anchors=50), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) > 4
    batch["assistant_mask"][0, 9:11] = False
    drafter, target = trainer.model, trainer.features.target
    drafter.eval()

    loss, outcome = trainer.compute_loss(drafter, batch, return_outputs=True)

    theirs, total, weights, own = target(batch["input_ids"]).logits, 0.0, 0.0, []
    for row, is_assistant in enumerate(batch["assistant_mask"].tolist()):
        for anchor in range(1, 13):
            text = batch["input_ids"][row, : anchor + 1]
            texts = DenoisedTexts(drafter, 1, 64)
            drafted = logits_behind(texts, text, 4)[..., : drafter.config.vocab_size]
            if not is_assistant[anchor + 1]:
                continue
            for offset in range(4):
                if anchor + 1 + offset < 14 and is_assistant[anchor + 1 + offset]:
                    pair = [drafted[offset].tolist()], [theirs[row, anchor + offset].tolist()]
                    total += 0.85**offset * (0.9 * naive_divergence(*pair) + 0.1 * naive_cross_entropy(*pair))
                    weights += 0.85**offset
        plain = drafter.model(batch["input_ids"][row : row + 1]).logits[0, :, : drafter.config.vocab_size]
        own += [(plain[p].tolist(), theirs[row, p].tolist()) for p in range(13) if is_assistant[p + 1]]
    pairs = tuple(map(list, zip(*own, strict=True)))
    expected = total / weights
    expected += 0.3 * (0.9 * naive_divergence(*pairs) + 0.1 * naive_cross_entropy(*pairs))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert set(outcome.block_offsets.tolist()) == {0, 1, 2, 3}


def test_it_learns_with_every_weight_and_the_target_stays_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=40, weight_decay=0.0, num_anchors=8)
    target_before = {name: value.clone() for name, value in trainer.features.target.state_dict().items()}
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    trainer.train()

    losses = loss_curve(trainer)
    assert losses[-1] < 0.8 * losses[0]  # of anchors drawn anew in each step
    assert all(not value.equal(start[name]) for name, value in trainer.model.state_dict().items())
    assert same(target_before, trainer.features.target.state_dict())
    assert "eval_accuracy_at_4" in trainer.evaluate()


def test_a_batch_in_which_no_block_can_start_costs_nothing(tmp_path: Path) -> None:
    trainer, batch = trainer_of(tmp_path), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) == 1  # what follows the first token

    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()

    assert loss == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in trainer.model.parameters())


@pytest.mark.parametrize(
    "options",
    [{"attention": "block_causal", "block_size": 4}, {"attention": "full"}, {"draft_vocab_size": 40}],
    ids=["grid", "full", "fewer tokens"],
)
def test_drafters_without_an_objective_are_refused(options: dict[str, Any]) -> None:
    target = make_target()

    with pytest.raises(OptionError, match="A diffusion drafter is trained with"):
        DiffusionObjective.read_target(make_diffusion(target, **options), target)
