"""The objective of diffusion drafters: trained as they draft, unable to see later tokens, all weights learn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.diffuspec.naive_model import sees
from tests.drafters.diffuspec.stand_ins import MASK, make_diffusion, scores_behind
from tests.tiny import make_target
from tests.training.objectives.test_medusa import make_trainer
from tests.training.runs import SMALL, example_batch, loss_curve, same
from tests.training.test_losses import naive_cross_entropy, naive_divergence
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.drafters.diffuspec.denoising import DenoisedTexts
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.shapes import EXACT
from transformers_falcon_spec.training.objectives.diffusion import DiffusionObjective, packed_blocks, single_blocks

KINDS = [("prefix_causal", 1), ("prefix_causal", 0), ("full", 1), ("full", 0)]


def trainer_of(folder: Path, attention: str = "prefix_causal", shift: int = 1, **options: Any) -> Any:
    target = make_target(**SMALL)
    drafter = DiffusionDrafter.from_target(target, attention=attention, logits_shift=shift, block_size=4)
    return make_trainer(folder, drafter, target, **options)


def anchors_of(attention: str) -> torch.Tensor:
    return torch.tensor([[5, 12], [9, 1]]) if attention == "full" else torch.tensor([[5, 2, 12], [9, 4, 1]])


@pytest.mark.parametrize(("attention", "shift"), KINDS)
@torch.no_grad()
def test_blocks_are_filled_in_as_in_a_draft(tmp_path: Path, attention: str, shift: int) -> None:
    trainer, batch = trainer_of(tmp_path, attention, shift), example_batch(2)
    drafter, pairs, anchors = trainer.model.eval(), trainer.features(batch), anchors_of(attention)

    layout = trainer.objective.layout(pairs, anchors)
    everything = torch.ones_like(layout.token_ids, dtype=torch.bool)
    logits = drafter(layout.token_ids, layout.positions, layout.allowed, everything)

    for row, its_anchors in enumerate(anchors.tolist()):
        for number, anchor in enumerate(its_anchors):
            text = batch["input_ids"][row, : anchor + 1]
            texts = DenoisedTexts(drafter, 1, 64, EXACT)
            drafted = scores_behind(drafter, texts, text, 4, 1, lambda found: found[..., : drafter.config.vocab_size])
            found = logits[layout.sources[row, number]]
            torch.testing.assert_close(found, drafted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_packed_mask_is_that_of_each_block_alone(shift: int) -> None:
    anchors, num_tokens, num_masks = anchors_of("prefix_causal"), 14, 4 - shift

    layout = packed_blocks(torch.zeros(2, num_tokens, dtype=torch.long), anchors, num_masks, shift, MASK)

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
                assert bool(layout.allowed[row, query, key]) == expected
        assert layout.positions[row, num_tokens:].tolist() == [
            int(anchor) + 1 + offset for anchor in anchors[row] for offset in range(num_masks)
        ]
    assert (layout.token_ids[:, num_tokens:] == MASK).all()


@pytest.mark.parametrize("attention", ["prefix_causal", "full"])
@torch.no_grad()
def test_no_row_of_a_block_sees_text_behind_its_anchor(tmp_path: Path, attention: str) -> None:
    trainer, batch, anchors = trainer_of(tmp_path, attention), example_batch(2), anchors_of(attention)

    def drafted(ids: torch.Tensor) -> torch.Tensor:
        layout = trainer.objective.layout(trainer.features({**batch, "input_ids": ids}), anchors)
        everything = torch.ones_like(layout.token_ids, dtype=torch.bool)
        return trainer.model.eval()(layout.token_ids, layout.positions, layout.allowed, everything)[layout.sources]

    before = drafted(batch["input_ids"])
    for position in range(14):
        ids = batch["input_ids"].clone()
        ids[:, position] = (ids[:, position] + 1) % 90
        differs = (drafted(ids) != before).any(-1)
        for row in range(2):
            for number, anchor in enumerate(anchors[row].tolist()):
                assert differs[row, number].all() == differs[row, number].any() == (position <= anchor)


@pytest.mark.parametrize(("attention", "shift"), KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_each_place_and_of_the_clean_text(tmp_path: Path, attention: str, shift: int) -> None:
    trainer, batch = trainer_of(tmp_path, attention, shift, num_anchors=50, anneal_share=0.0), example_batch(2)
    batch["assistant_mask"] = torch.arange(14).expand(2, -1) > 4
    batch["assistant_mask"][0, 9:11] = False
    drafter, target = trainer.model, trainer.features.target
    drafter.eval()

    loss, outcome = trainer.compute_loss(drafter, batch, return_outputs=True)

    theirs, total, weights, own = target(batch["input_ids"]).logits, 0.0, 0.0, []
    for row, is_assistant in enumerate(batch["assistant_mask"].tolist()):
        for anchor in range(1, 13):
            text = batch["input_ids"][row, : anchor + 1]
            texts = DenoisedTexts(drafter, 1, 64, EXACT)
            drafted = scores_behind(drafter, texts, text, 4, 1, lambda found: found[..., : drafter.config.vocab_size])
            if not is_assistant[anchor + 1]:
                continue
            for offset in range(4):
                if anchor + 1 + offset < 14 and is_assistant[anchor + 1 + offset]:
                    pair = [drafted[offset].tolist()], [theirs[row, anchor + offset].tolist()]
                    total += 0.85**offset * (0.9 * naive_divergence(*pair) + 0.1 * naive_cross_entropy(*pair))
                    weights += 0.85**offset
        plain = drafter.model(batch["input_ids"][row : row + 1]).logits[0, :, : drafter.config.vocab_size]
        own += [(plain[p].tolist(), theirs[row, p].tolist()) for p in range(13) if is_assistant[p + 1]]
    expected = total / weights
    if attention != "full":
        pairs = tuple(map(list, zip(*own, strict=True)))
        expected += 0.3 * (0.9 * naive_divergence(*pairs) + 0.1 * naive_cross_entropy(*pairs))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert set(outcome.block_offsets.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("attention", ["prefix_causal", "full"])
def test_it_learns_with_every_weight_and_the_target_stays_as_it_is(tmp_path: Path, attention: str) -> None:
    trainer = trainer_of(tmp_path, attention, max_steps=40, weight_decay=0.0, num_anchors=8)
    target_before = {name: value.clone() for name, value in trainer.features.target.state_dict().items()}
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    trainer.train()

    losses = loss_curve(trainer)
    assert losses[-1] < 0.8 * losses[0]  # of anchors drawn anew in each step
    assert all(not value.equal(start[name]) for name, value in trainer.model.state_dict().items())
    assert same(target_before, trainer.features.target.state_dict())
    assert "eval_accuracy_at_4" in trainer.evaluate()


def test_with_annealing_more_and_more_of_the_later_slots_are_seen(tmp_path: Path) -> None:
    trainer, anchors = trainer_of(tmp_path, "full", anneal_share=0.5), torch.tensor([[12], [12]])
    layout = trainer.objective.layout(trainer.features(example_batch(2)), anchors)
    behind = torch.ones(layout.allowed.shape[1:], dtype=torch.bool).triu(1) & layout.allowed[0]

    shares = {}
    for progress in (0.0, 0.25, 0.4, 0.5, 1.0):
        generator = torch.Generator().manual_seed(0)
        seen = trainer.objective._annealed(trainer.model.train(), layout, generator, progress).allowed
        assert (seen | behind).all()  # what stands before is always seen
        shares[progress] = float(seen[:, behind].float().mean())
    evaluated = trainer.objective._annealed(trainer.model.eval(), layout, torch.Generator(), 0.0).allowed

    assert shares[0.0] == 0
    assert 0.35 < shares[0.25] < 0.65
    assert 0.65 < shares[0.4] < 0.95
    assert shares[0.5] == shares[1.0] == 1
    assert evaluated.equal(layout.allowed)


def test_single_blocks_end_where_their_masks_end() -> None:
    ids = torch.arange(20, 34).repeat(2, 1)

    layout = single_blocks(ids, torch.tensor([[2, 12], [12, 3]]), 3, 1, MASK)

    assert layout.token_ids[0, :6].tolist() == [20, 21, 22, MASK, MASK, MASK]
    assert layout.token_ids[1].tolist() == [*range(20, 33), MASK, MASK, MASK]
    assert layout.token_ids[3, :7].tolist() == [20, 21, 22, 23, MASK, MASK, MASK]
    assert layout.allowed[0].sum(-1).tolist() == [6] * 16
    assert layout.sources[0].tolist() == [[2, 3, 4, 5], [28, 29, 30, 31]]  # of texts of 16 slots
    assert layout.sources[1].tolist() == [[44, 45, 46, 47], [51, 52, 53, 54]]


def test_a_batch_in_which_no_block_can_start_costs_nothing(tmp_path: Path) -> None:
    for attention in ("prefix_causal", "full"):
        trainer, batch = trainer_of(tmp_path, attention), example_batch(2)
        batch["assistant_mask"] = torch.arange(14).expand(2, -1) == 1  # what follows the first token

        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()

        assert loss == 0
        assert all(weight.grad is None or not weight.grad.any() for weight in trainer.model.parameters())


@pytest.mark.parametrize(
    "options", [{"attention": "block_causal", "block_size": 4}, {"draft_vocab_size": 40}], ids=["grid", "fewer tokens"]
)
def test_drafters_without_an_objective_are_refused(options: dict[str, Any]) -> None:
    target = make_target()

    with pytest.raises(OptionError, match="A diffusion drafter is trained with"):
        DiffusionObjective.read_target(make_diffusion(target, **options), target)


def test_a_share_of_annealing_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"`anneal_share` must lie in 0\.\.1, but it is 1\.5"):
        trainer_of(tmp_path, anneal_share=1.5)
