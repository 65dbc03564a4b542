"""Glancing: what is revealed, and that no row that counts can read its own label.

A row r holds content c: the feature of token c and the embedding of token c + 1; c is r, or r + k where r is revealed.
A row q that counts should say feature q + k and token q + k + 1, so it may be reached by contents below q + k alone.
"""

import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB_SIZE
from transformers_falcon_spec import FalconSpecConfig, FalconSpecDrafter
from transformers_falcon_spec.training.features import PairBatch
from transformers_falcon_spec.training.objectives.falcon import glancing_budget, reveal, reveal_mask

WIDTH = 8
LENGTH = 13


def small_drafter(block_size: int, recurrence: str = "sequence") -> FalconSpecDrafter:
    """A drafter of float64 weights large enough that every dependence shows."""
    config = FalconSpecConfig(
        hidden_size=WIDTH,
        intermediate_size=12,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        recurrence=recurrence,
        initializer_range=WIDTH**-0.5,
    )
    drafter = FalconSpecDrafter(config).double().eval()
    with torch.no_grad():
        for weight in drafter.recurrence.parameters():
            weight.normal_(std=WIDTH**-0.5)
    return drafter


def make_pairs(embeds: Tensor, features: Tensor, is_counted: Tensor) -> PairBatch:
    return PairBatch(
        input_ids=torch.zeros(len(embeds), embeds.shape[1] + 1, dtype=torch.long),
        token_embeds=embeds,
        features=features,
        labels=torch.zeros_like(features),
        is_token=torch.ones_like(is_counted),
        is_counted=is_counted,
    )


def block_offsets_of(is_counted: Tensor, phases: Tensor, block_size: int) -> Tensor:
    """How far each row is from the first of its block."""
    return (torch.arange(is_counted.shape[1]) - phases[:, None]) % block_size


def reached_by(block_size: int, phase: int, mask: Tensor, recurrence: str) -> dict[int, set[int]]:
    """For each row that still counts, the contents that reach it, by the gradients of the real model."""
    drafter = small_drafter(block_size, recurrence)
    embeds, clean = (torch.randn(1, LENGTH, WIDTH, dtype=torch.double).requires_grad_() for _ in range(2))
    is_counted = (torch.arange(LENGTH) < LENGTH - block_size)[None]
    noisy = make_pairs(embeds, clean + torch.rand_like(clean), is_counted)

    shown = reveal(noisy, clean, mask[None], block_size)
    outputs = drafter(shown.token_embeds, shown.features, torch.tensor([phase]), shown.is_token)

    reached = {}
    for row in shown.is_counted[0].nonzero().flatten().tolist():
        gradients = torch.autograd.grad(outputs[0, row].sum(), [embeds, clean], retain_graph=True)
        touched = sum(gradient[0].abs().sum(-1) for gradient in gradients)
        reached[row] = set(touched.nonzero().flatten().tolist())
    return reached


def leaks(reached: dict[int, set[int]], block_size: int) -> dict[int, set[int]]:
    """Rows that count and are reached by what they should say, or by what comes after it."""
    return {row: late for row, contents in reached.items() if (late := {c for c in contents if c >= row + block_size})}


def rows_mask(rows: list[int]) -> Tensor:
    return torch.tensor([row in rows for row in range(LENGTH)])


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
@pytest.mark.parametrize(("block_size", "phase"), [(k, phase) for k in (2, 3, 4) for phase in range(k)])
@pytest.mark.parametrize("num_rows", [0, 2, 100])
def test_no_row_that_counts_is_reached_by_its_label(
    block_size: int, phase: int, num_rows: int, recurrence: str
) -> None:
    is_counted = (torch.arange(LENGTH) < LENGTH - block_size)[None]
    block_offsets = block_offsets_of(is_counted, torch.tensor([phase]), block_size)
    mask = reveal_mask(is_counted, block_offsets, block_size, num_rows, torch.Generator().manual_seed(phase))

    reached = reached_by(block_size, phase, mask[0], recurrence)

    assert leaks(reached, block_size) == {}
    assert bool(mask.any()) == (num_rows > 0)
    assert set(reached) == set(range(LENGTH - block_size)) - set(mask[0].nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("block_size", "revealed", "leaking"),
    [
        (2, [7], {6: {9}}),  # row 7 shows f_9 and t_10; row 6 before it should say f_8 and t_9, which went into f_9
        (3, [7], {6: {10}}),
        (3, [8], {6: {11}, 7: {11}}),
        (3, [6, 8], {7: {11}}),
        (4, [4, 6, 7], {5: {10, 11}}),
    ],
)
def test_the_check_finds_the_leak_of_a_revealed_row_that_begins_no_block(
    block_size: int, revealed: list[int], leaking: dict[int, set[int]]
) -> None:
    reached = reached_by(block_size, 0, rows_mask(revealed), "sequence")

    assert leaks(reached, block_size) == leaking


@pytest.mark.parametrize(
    ("block_size", "revealed", "contents", "steps_ahead"),
    [
        (2, [6], {6: 8, 7: 7}, {7: 1}),
        (3, [6], {6: 9, 7: 7, 8: 8}, {7: 1, 8: 2}),
        (3, [6, 7], {6: 9, 7: 10, 8: 8}, {8: 1}),
        (2, [], {6: 6, 7: 7}, {6: 1, 7: 2}),
    ],
)
def test_the_worked_example_of_the_block_at_row_6(
    block_size: int, revealed: list[int], contents: dict[int, int], steps_ahead: dict[int, int]
) -> None:
    indices = torch.arange(LENGTH, dtype=torch.double)[None, :, None]
    pairs = make_pairs(indices + 1, indices + 100, torch.ones(1, LENGTH, dtype=torch.bool))

    shown = reveal(pairs, indices, rows_mask(revealed)[None], block_size)
    reached = reached_by(block_size, 0, rows_mask(revealed), "sequence")

    noise = {row: 0 if row in revealed else 100 for row in contents}
    assert {row: shown.features[0, row].item() for row in contents} == {r: c + noise[r] for r, c in contents.items()}
    assert {row: shown.token_embeds[0, row].item() for row in contents} == {r: c + 1 for r, c in contents.items()}
    assert [row for row in contents if shown.is_counted[0, row]] == list(steps_ahead)
    assert {row: row + block_size - max(reached[row]) for row in steps_ahead} == steps_ahead


def test_revealing_changes_both_inputs_and_the_count_of_revealed_rows_alone() -> None:
    embeds, features = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)
    pairs = make_pairs(embeds, features, torch.ones(2, LENGTH, dtype=torch.bool))
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[1, 4] = True

    shown = reveal(pairs, features + 1, mask, 3)

    assert torch.equal(shown.token_embeds[1, 4], embeds[1, 7])
    assert torch.equal(shown.features[1, 4], features[1, 7] + 1)
    assert torch.equal(shown.token_embeds[~mask], embeds[~mask])
    assert torch.equal(shown.features[~mask], features[~mask])
    assert torch.equal(shown.is_counted, ~mask)
    assert torch.equal(shown.labels, pairs.labels)


def random_counted(seed: int, num_rows: int = 3, length: int = 40) -> Tensor:
    """Answers here and there."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, length // 8, generator=generator).lt(0.6).repeat_interleave(8, dim=1)


@pytest.mark.parametrize("block_size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_revealed_rows_are_prefixes_of_whole_blocks_inside_the_loss_mask(block_size: int, seed: int) -> None:
    is_counted = random_counted(seed)
    phases = torch.arange(3) % block_size

    mask = reveal_mask(
        is_counted,
        block_offsets_of(is_counted, phases, block_size),
        block_size,
        9,
        torch.Generator().manual_seed(seed),
    )

    for row, phase in enumerate(phases.tolist()):
        revealed = mask[row].nonzero().flatten().tolist()
        for index in revealed:
            start = index - (index - phase) % block_size
            block = range(start, start + block_size)
            assert all(is_counted[row, each] for each in block)
            assert all(each in revealed for each in range(start, index))  # a prefix
        assert not any((index - phase) % block_size == block_size - 1 for index in revealed)  # never a whole block


@pytest.mark.parametrize("block_size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 1000])
def test_prefixes_are_drawn_until_the_budget_is_spent(block_size: int, num_rows: int) -> None:
    is_counted = torch.ones(2, 60, dtype=torch.bool)

    block_offsets = block_offsets_of(is_counted, torch.tensor([0, 1]), block_size)
    mask = reveal_mask(is_counted, block_offsets, block_size, num_rows, torch.Generator().manual_seed(3))

    num_blocks = 60 // block_size + 59 // block_size
    num_revealed = int(mask.sum())
    assert min(num_rows, num_blocks) <= num_revealed
    assert num_revealed <= num_rows + block_size - 2 or num_rows == 0 == num_revealed


def test_blocks_of_one_row_are_never_revealed() -> None:
    mask = reveal_mask(
        torch.ones(1, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.long), 1, 5, torch.Generator()
    )

    assert not mask.any()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_text_shorter_than_a_block_is_not_revealed(length: int) -> None:
    is_counted = torch.ones(1, length, dtype=torch.bool)

    mask = reveal_mask(is_counted, block_offsets_of(is_counted, torch.tensor([0]), 3), 3, 5, torch.Generator())

    assert mask.shape == (1, length)
    assert not mask.any()


def test_the_choice_is_the_generators_alone() -> None:
    is_counted = random_counted(0)
    block_offsets = block_offsets_of(is_counted, torch.tensor([0, 1, 2]), 3)
    before = torch.get_rng_state()

    first, again, other = (
        reveal_mask(is_counted, block_offsets, 3, 6, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_block_and_every_length_has_its_turn() -> None:
    is_counted = torch.ones(1, 12, dtype=torch.bool)
    block_offsets = block_offsets_of(is_counted, torch.tensor([1]), 4)
    generator = torch.Generator().manual_seed(0)

    draws = [reveal_mask(is_counted, block_offsets, 4, 1, generator)[0].nonzero().flatten() for _ in range(200)]

    found = {(rows[0].item(), len(rows)) for rows in draws}
    assert found == {(start, length) for start in (1, 5) for length in (1, 2, 3)}


@pytest.mark.parametrize(
    ("num_mismatches", "ratio", "progress", "expected"),
    [(100, 0.4, 0.0, 40), (100, 0.4, 0.5, 20), (100, 0.4, 1.0, 0), (0, 0.4, 0.0, 0), (7, 1.0, 0.0, 7)],
)
def test_the_budget_falls_to_nothing_as_training_goes_on(
    num_mismatches: int, ratio: float, progress: float, expected: int
) -> None:
    assert glancing_budget(num_mismatches, ratio, progress) == expected
