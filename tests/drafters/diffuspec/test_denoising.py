"""What the diffusion model reads in a round: masks hold, caches are exact where they are said to be, and shifts are not lost."""

from typing import Any

import pytest
import torch

from tests.drafters.diffuspec.naive_model import naive_logits, sees
from tests.drafters.diffuspec.stand_ins import logits_behind, make_diffusion
from transformers_falcon_spec.drafters.diffuspec.drafter import DenoisedTexts, logits_of, most_behind, visible

TEXT = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(3))
ROUNDS = (3, 7, 8, 9, 15, 16, 17, 30)  # lengths of the text, over blocks of 4 and of 5
KINDS = [("prefix_causal", 5), ("block_causal", 4), ("block_causal", 5), ("full", None)]


def without_mask(logits: torch.Tensor, mask: int) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([mask]), -torch.inf)


@torch.no_grad()
def rounds(drafter: Any) -> list[tuple[int, int, torch.Tensor]]:
    """Of each round the length of the text, the number of positions filled in, and what was said of them."""
    texts, found = DenoisedTexts(drafter, 1, 64), []
    mask = drafter.config.mask_token_id
    for length in ROUNDS:
        num = min(4, most_behind(drafter, length))
        found.append((length, num, without_mask(logits_behind(texts, TEXT[:length], num), mask)))
    return found


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("attention", "block_size"), KINDS)
def test_what_is_kept_between_rounds_changes_nothing(attention: str, block_size: int | None, shift: int) -> None:
    drafter = make_diffusion(attention=attention, block_size=block_size, logits_shift=shift)

    for length, num, logits in rounds(drafter):
        naive = naive_logits(drafter, TEXT[:length].tolist(), [drafter.config.mask_token_id] * num)
        torch.testing.assert_close(logits, without_mask(naive, drafter.config.mask_token_id), rtol=1e-5, atol=1e-5)


def test_only_new_text_is_read_where_the_cache_is_exact() -> None:
    num_read: dict[str, list[int]] = {}
    for attention, block_size in (("prefix_causal", 5), ("block_causal", 4), ("full", 5)):
        drafter = make_diffusion(attention=attention, block_size=block_size)
        sizes: list[int] = []
        drafter.model.register_forward_pre_hook(
            lambda _module, _args, kwargs, sizes=sizes: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        rounds(drafter)
        num_read[attention] = sizes

    new = [after - before for before, after in zip((0, *ROUNDS), ROUNDS, strict=False)]
    assert num_read["prefix_causal"] == [number + 3 for number in new]
    assert num_read["full"] == [length + 3 for length in ROUNDS]
    starts = [0, 0, 4, 8, 8, 12, 16, 16]  # whole blocks are kept, but the newest token is always read
    nums = [2, 2, 4, 4, 2, 4, 4, 3]
    assert num_read["block_causal"] == [
        length - start + num - 1 for length, start, num in zip(ROUNDS, starts, nums, strict=True)
    ]


@pytest.mark.parametrize("attention", ["full", "prefix_causal", "block_causal"])
@torch.no_grad()
def test_a_later_token_is_seen_by_earlier_ones_with_full_attention_alone(attention: str) -> None:
    drafter = make_diffusion(attention=attention, block_size=4)
    positions = torch.arange(12)
    allowed = visible(attention, 8, 4, positions, positions)[None]

    def logits(text: torch.Tensor) -> torch.Tensor:
        return logits_of(drafter.model, text[None], positions[None], allowed, 12)[0]

    text = torch.cat([TEXT[:8], torch.full((4,), drafter.config.mask_token_id)])
    before = logits(text)
    for changed in range(12):
        differs = (logits(text.index_fill(0, torch.tensor([changed]), 5)) != before).any(-1).tolist()
        assert differs == [sees(attention, position, changed, 8, 4) for position in range(12)]


def test_with_a_shift_the_first_token_is_the_models_own_next_token() -> None:
    drafter = make_diffusion(attention="prefix_causal", logits_shift=1)

    _, _, logits = rounds(drafter)[0]

    plain = drafter.model(input_ids=TEXT[None, : ROUNDS[0]]).logits[0, -1].float()
    torch.testing.assert_close(
        logits[0], without_mask(plain[None], drafter.config.mask_token_id)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "lengths", "most"),
    [
        ({"block_size": 5}, (3, 200), [5, 5]),
        ({"block_size": 5}, (252, 254, 256, 257), [5, 3, 1, 0]),  # of 256 positions; the last token needs none
        ({"block_size": 5, "logits_shift": 0}, (252, 254, 256), [4, 2, 0]),
        ({"attention": "block_causal", "block_size": 4, "logits_shift": 0}, (4, 5, 7, 8), [4, 3, 1, 4]),
        ({"attention": "block_causal", "block_size": 4, "logits_shift": 1}, (4, 5, 7, 8), [4, 4, 2, 4]),
        ({"attention": "full", "block_size": None}, (3,), [20]),
    ],
)
def test_drafts_end_with_the_block_and_the_models_context(
    options: dict[str, Any], lengths: tuple[int, ...], most: list[int]
) -> None:
    drafter = make_diffusion(**options)

    assert [most_behind(drafter, length) for length in lengths] == most
