"""Ways in which people use a target with recurrent layers, each beside plain decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_prompt
from transformers_falcon_spec import GenerationStats
from transformers_falcon_spec.transformers_versions import CACHE

NUM_NEW = 16  # tokens of a text, or of a turn
NUM_TURNS = 3
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
TOLERANCE = 1e-3  # of scores: rules of recurrent layers are computed in single precision whatever the target's type

MakeDrafter = Callable[[Tensor], Any]  # of the text that will be written
#: Drafters by what they know of the text. They draft in every step, also where that does not pay.
DRAFTERS: dict[str, MakeDrafter] = {
    "informed": lambda text: InformedDrafter(RandomDrafter(tune=False), text, hit_rate=0.9),
    "random": lambda _: RandomDrafter(tune=False),
}


@dataclass(frozen=True)
class Outcome:
    """Whether a use gives what plain decoding gives, and what speculation did."""

    is_same: bool
    stats: GenerationStats


def _written(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter, **options: Any) -> tuple[runs.Pair, bool]:
    """A text without and with a drafter, and whether it is the same, and the random stream after it."""
    prompt = make_prompt(12, seed)
    options = {"seed": seed, "max_new_tokens": NUM_NEW, **options}
    plain = runs.plain(target, prompt, **options)
    state = torch.get_rng_state()

    drafted = runs.drafted(target, make_drafter(plain.sequences), prompt, **options)
    pair = runs.Pair(plain, drafted, state, torch.get_rng_state())
    return pair, pair.drafted.sequences.equal(plain.sequences) and pair.drafted_state.equal(state)


def greedy(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A greedy text."""
    pair, is_same = _written(target, seed, make_drafter)
    return Outcome(is_same, pair.stats)


def sampled(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A text of a seed."""
    pair, is_same = _written(target, seed, make_drafter, **SAMPLED)
    return Outcome(is_same, pair.stats)


def processed(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A text of a seed, with processors that read the text and warp scores."""
    pair, is_same = _written(target, seed, make_drafter, **runs.SAMPLING)
    return Outcome(is_same, pair.stats)


def scored(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A text of a seed with its scores and logits."""
    pair, is_same = _written(target, seed, make_drafter, **SAMPLED, output_scores=True, output_logits=True)
    for name in ("scores", "logits"):
        mine, theirs = (torch.cat(getattr(output, name)) for output in (pair.drafted, pair.plain))
        is_same = is_same and torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    return Outcome(is_same, pair.stats)


def handed_on(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A text, and what plain decoding writes behind it with the cache that came back."""
    pair, is_same = _written(target, seed, make_drafter)
    later = []
    for output in (pair.plain, pair.drafted):
        cache = getattr(output, CACHE)
        given = _given(output.sequences, cache, num_unread=1)
        later.append(runs.plain(target, given, max_new_tokens=NUM_NEW, **{CACHE: cache}).sequences)
    return Outcome(is_same and later[0].equal(later[1]), pair.stats)


def batch(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """Four greedy texts at once, two of them padded, that keep different numbers of tokens.

    And what plain decoding writes behind them with the cache that came back.
    """
    prompt = torch.cat([make_prompt(12, 4 * seed + row) for row in range(4)])
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    mask[3, :7] = 0
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "attention_mask": mask}
    plain = runs.plain(target, prompt, **options)

    drafter = make_drafter(plain.sequences)
    if isinstance(drafter, InformedDrafter):
        drafter = InformedDrafter(drafter.drafter, plain.sequences, drafter.hit_rate, mask)
    drafted = runs.drafted(target, drafter, prompt, **options)

    options["attention_mask"] = torch.cat([mask, torch.ones_like(plain.sequences[:, prompt.shape[1] :])], dim=-1)
    later = []
    for output in (plain, drafted):
        cache = getattr(output, CACHE)
        given = _given(output.sequences, cache, num_unread=1)
        later.append(runs.plain(target, given, **options, **{CACHE: cache}).sequences)
    is_same = drafted.sequences.equal(plain.sequences) and later[0].equal(later[1])

    return Outcome(is_same, drafted.speculation)


def turns(target: PreTrainedModel, seed: int, make_drafter: MakeDrafter) -> Outcome:
    """A conversation, each turn with the cache of the last one."""
    text, stats, is_same = make_prompt(12, seed), GenerationStats(), True
    num_unread = text.shape[1]
    caches = [DynamicCache(config=target.config), DynamicCache(config=target.config)]

    for turn in range(NUM_TURNS):
        given, options = _given(text, caches[0], num_unread), {"seed": seed, "max_new_tokens": NUM_NEW, **SAMPLED}
        options["attention_mask"] = torch.ones_like(text)  # else tokens that are as padding would be left out
        plain = runs.plain(target, given, **options, **{CACHE: caches[0]})
        state = torch.get_rng_state()
        drafter = make_drafter(plain.sequences)
        drafted = runs.drafted(target, drafter, given, **options, **{CACHE: caches[1]})

        is_same = is_same and drafted.sequences.equal(plain.sequences) and torch.get_rng_state().equal(state)
        stats = stats + drafted.speculation
        question = make_prompt(5, seed + turn)
        text = torch.cat([text, plain.sequences[:, given.shape[1] :], question], dim=-1)
        num_unread = 1 + question.shape[1]  # the newest token of a text is never read

    return Outcome(is_same, stats)


def _given(text: Tensor, cache: Any, num_unread: int) -> Tensor:
    """What a call gets beside a cache: the whole text; of recurrent layers alone, which count no tokens, the new ones."""
    return text if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else text[:, -num_unread:]


#: The ways by name.
USES: dict[str, Callable[[PreTrainedModel, int, MakeDrafter], Outcome]] = {
    use.__name__: use for use in (greedy, sampled, processed, scored, handed_on, batch, turns)
}
