"""A filled cache that goes on with new ids alone, and prompts that are padding throughout: every kind of drafter drafts, and the text is plain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests import runs
from tests.adapters import KINDS
from tests.doubles import InformedDrafter, RandomDrafter
from tests.drafters.easyspec.kinds import make_drafter as make_easyspec
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.transformers_versions import CACHE, CHUNKS_READ_CACHED_TOKENS_AGAIN

pytestmark = pytest.mark.families

DRAFTERS: dict[str, Callable[[Any], Any]] = {
    **KINDS,
    "lookahead": LookaheadDrafter.from_target,
    "easyspec": make_easyspec,
}
QUICK = ("falcon, as shipped", "eagle-1", "medusa", "diffusion", "lookahead", "easyspec")
CASES = [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in DRAFTERS]
ROWS = [1, pytest.param(2, marks=pytest.mark.slow)]
MASKS = [[[0] * 6], [[0]], [[0] * 6, [0, 0, 1, 1, 1, 1]], [[0] * 6] * 2]
FAMILIES = ("gpt2", "gemma3", "llama4", "bloom", "gpt_neo", "lfm2", "qwen3_5", "falcon_h1", "phi3")
NUM_FIRST, NUM_NEW = 10, 5


class Turn:
    """A first turn of `rows` texts, and the new ids that follow it; each call gets a fresh cache."""

    def __init__(self, target: Any, rows: int = 1, num_padding: int = 0) -> None:
        self.target, self.rows = target, rows
        self.mask = torch.ones(rows, NUM_FIRST, dtype=torch.long)
        self.mask[0, :num_padding] = 0

    def write(self, gold: Tensor | None = None, drafter: Any = None, **options: Any) -> Any:
        first = torch.cat([make_prompt(NUM_FIRST, seed) for seed in range(self.rows)])
        cache = DynamicCache(config=self.target.config)
        text = runs.plain(
            self.target, first, max_new_tokens=7, past_key_values=cache, attention_mask=self.mask
        ).sequences
        text = torch.cat([text, *[torch.cat([make_prompt(NUM_NEW, 50 + seed) for seed in range(self.rows)])]], dim=-1)
        mask = torch.nn.functional.pad(self.mask, (0, text.shape[1] - NUM_FIRST), value=1)
        if gold is not None:
            options["assistant_model"] = InformedDrafter(drafter, gold)
        new_ids = text[:, cache.get_seq_length() :]
        return runs.plain(self.target, new_ids, attention_mask=mask, past_key_values=cache, **options)

    def assert_own_text(self, drafter: Any, **options: Any) -> None:
        plain = self.write(**options)
        state = torch.get_rng_state()

        drafted = self.write(plain.sequences, drafter, **options)

        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert torch.get_rng_state().equal(state)
        assert drafted.speculation.acceptance_length > 1
        caches = drafted.past_key_values, plain.past_key_values
        assert [cache.get_seq_length() for cache in caches] == [16 + NUM_NEW + 24] * 2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", CASES)
def test_every_kind_of_drafter_goes_on_with_new_ids_alone(kind: str, rows: int) -> None:
    target = in_double(make_target(seed=7))

    Turn(target, rows).assert_own_text(DRAFTERS[kind](target))


@pytest.mark.parametrize(
    ("family", "num_padding"),
    [
        (family, num) for family in FAMILIES for num in (0, 4) if (family, num) != ("bloom", 4)
    ],  # NaN without a drafter, too
)
def test_every_form_of_reading_goes_on_with_new_ids_alone(family: str, num_padding: int) -> None:
    target = in_double(make_target(family, seed=7))

    Turn(target, num_padding=num_padding).assert_own_text(RandomDrafter(num_nodes=12), **runs.SAMPLING)


def test_the_features_are_those_of_the_new_ids() -> None:
    target = in_double(make_target(seed=7))
    turn, drafter = Turn(target), RandomDrafter(feature_layers=(1, -1))

    turn.assert_own_text(drafter)

    commits = drafter.generators[-1].commits
    states = turn.write(output_hidden_states=True).hidden_states
    for index, layer in enumerate((1, -1)):
        found = torch.cat([commit.features for commit in commits], dim=1)[..., index * 64 : (index + 1) * 64]
        torch.testing.assert_close(found, torch.cat([step[layer] for step in states], dim=1))


def test_the_context_holds_what_the_cache_holds_too() -> None:
    target = make_target("gpt2", n_positions=20)
    with pytest.raises(IndexError):
        Turn(target).write()

    with pytest.raises(GenerationError, match="must fit the target's context of 20 tokens, but it has 22"):
        Turn(target).write(make_prompt(), RandomDrafter())


@pytest.mark.parametrize(
    "mask", [MASKS[0], *(pytest.param(mask, marks=pytest.mark.slow) for mask in MASKS[1:])], ids=str
)
@pytest.mark.parametrize("kind", CASES)
def test_a_prompt_of_padding_alone_gives_the_targets_text(kind: str, mask: list[list[int]]) -> None:
    target, is_text = in_double(make_target(seed=7)), torch.tensor(mask)
    prompt = torch.cat([make_prompt(is_text.shape[1], seed) for seed in range(len(mask))])
    gold = runs.plain(target, prompt, attention_mask=is_text).sequences

    drafter = InformedDrafter(DRAFTERS[kind](target), gold, mask=is_text)
    drafted = runs.drafted(target, drafter, prompt, attention_mask=is_text)

    assert drafted.sequences.tolist() == gold.tolist()
    assert drafted.speculation.num_accepted > 0


@pytest.mark.parametrize(("num_cached", "is_whole"), [(0, True), (6, True), (3, False)])
def test_a_prompt_read_in_chunks_is_read_once(num_cached: int, is_whole: bool) -> None:
    """Transformers before 5.23 reads all of it where the cache holds some, which is refused in words."""
    target = in_double(make_target())
    prompt = make_prompt(NUM_FIRST)
    mask = torch.ones_like(prompt)
    given = prompt if is_whole else prompt[:, num_cached:]

    def write(drafter: Any = None) -> Tensor:
        cache = DynamicCache(config=target.config)
        if num_cached:
            target(prompt[:, :num_cached], use_cache=True, **{CACHE: cache})
        options = {CACHE: cache, "prefill_chunk_size": 4, "max_new_tokens": 8, "do_sample": False}
        return target.generate(given, attention_mask=mask, assistant_model=drafter, **options)

    plain = write()
    if num_cached and is_whole and CHUNKS_READ_CACHED_TOKENS_AGAIN:
        with pytest.raises(GenerationError, match=r"reads tokens that the cache holds once more: it has 6 of the 10"):
            write(RandomDrafter())
        return

    whole = torch.cat([prompt[:, : prompt.shape[1] - given.shape[1]], plain], dim=-1)
    assert write(InformedDrafter(RandomDrafter(), whole)).tolist() == plain.tolist()
