"""Whether texts differ where rounding decided: the two best choices were closer than the two runs' scores are to each other."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.families import VOCAB_SIZE
from tests.trials.call import Call
from tests.trials.compare import CUT, are_close, prompt_len, split
from tests.trials.written import Written, drafted, plain
from transformers_falcon_spec.core.sampling import CoupledDraws, row_seeds


def is_tie(call: Call, target: object, row: int | None, gold: Tensor | None) -> bool:
    """Whether the first difference in the text is a tie, proven by the scores of both sides there; `row` if it was written alone."""
    call = replace(call, outputs=("scores", "logits"), has_dict=True, streams=False)
    seed = call.seed if row is None else seeds_of(call)[row]
    one, other = plain(call, target, row, seed), drafted(call, target, gold)
    if one.error or other.error:
        return False
    where = split(call, one, other, row)
    return where is not None and _is_close_choice(call, one, other, where, None if row is None else 0)


def seeds_of(call: Call) -> list[int]:
    """The seed of each row of a sampled batch."""
    torch.manual_seed(call.seed)
    return row_seeds(len(call.lengths))


def _is_close_choice(call: Call, one: Written, other: Written, where: tuple[int, int], plain_row: int | None) -> bool:
    row, step = where[0], where[1] - prompt_len(call)
    mine = row if plain_row is None else plain_row
    if step >= min(len(one.output.scores), len(other.output.scores)):
        return False
    logits = one.output.logits[step][mine], other.output.logits[step][row]
    left, right = one.output.scores[step][mine].double(), other.output.scores[step][row].double()
    if not are_close(*logits, call.dtype) or not are_close(left, right, call.dtype, CUT):
        return False
    assert one.text is not None
    assert other.text is not None
    tokens = int(one.text[mine, where[1]]), int(other.text[row, where[1]])
    has_moved = not torch.equal(left.isinf(), right.isinf())  # a token's score stands where the processors cut
    noise = _noise(call, one.seed, row, step) if call.is_sampled else 0.0
    lead = (left + noise)[tokens[0]] - (left + noise)[tokens[1]]
    gap = (left - right).masked_fill(left.isinf(), 0).abs().amax()
    return has_moved or bool(lead <= 2 * gap + 1e-6)


def _noise(call: Call, seed: int, row: int, step: int) -> Tensor:
    """What sampling adds to the scores of a step, see `GeneratorDraws` and `CoupledDraws`."""
    if call.rule.couples_draws:
        torch.manual_seed(seed)
        coupled = CoupledDraws(seeds_of(call)[row]) if len(call.lengths) > 1 else CoupledDraws.from_global_stream()
        return -coupled.noise(step, VOCAB_SIZE).double().log()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(step + 1):
        noise = torch.empty(1, VOCAB_SIZE).exponential_(generator=generator)
    return -noise[0].double().log()
