"""Padded batches: prompts of mixed length, and the same batch without and with a drafter."""

from dataclasses import dataclass
from typing import Any

import torch

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_prompt
from transformers_falcon_spec.core.sampling import row_seeds

LENGTHS = (12, 5, 9, 3)


@dataclass(frozen=True)
class Prompts:
    """Prompts of mixed length, padded on the left."""

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...] = LENGTHS) -> "Prompts":
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, -length:] = make_prompt(length, seed=row)
            mask[row, -length:] = 1
        return cls(ids, mask)


def batch_and_drafted(
    target: Any, drafter: Any = None, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> runs.Pair:
    """A padded batch without and with a drafter that knows part of the coming text."""
    prompts = Prompts.of(lengths)
    options = {"attention_mask": prompts.mask, **options}
    without = runs.plain(target, prompts.ids, **options)
    state = torch.get_rng_state()
    informed = InformedDrafter(RandomDrafter() if drafter is None else drafter, without.sequences, mask=prompts.mask)
    return runs.Pair(without, runs.drafted(target, informed, prompts.ids, **options), state, torch.get_rng_state())


def assert_sampled_rows_are_single_runs(target: Any, drafter: Any, prompts: torch.Tensor, **options: Any) -> None:
    """What a batch without padding samples is what each row alone samples without a drafter, from that row's seed."""
    options = {"do_sample": True, **options}
    torch.manual_seed(0)
    seeds = row_seeds(len(prompts))

    rows = runs.drafted(target, drafter, prompts, **options).sequences

    for number, seed in enumerate(seeds):
        alone = runs.plain(target, prompts[number : number + 1], seed=seed, **options).sequences
        assert rows[number].tolist() == alone[0].tolist()
