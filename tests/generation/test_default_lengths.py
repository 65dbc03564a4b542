"""Families at the lengths that their configs name by default: texts of thousands of tokens go on as the target alone writes them."""

from typing import Any

import pytest
import torch
import transformers

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import DRAFTED, FAMILIES
from tests.thresholds import SCALINGS, thresholds
from tests.tiny import make_prompt, make_target

MOST_TOKENS = 8192  # that attention over all pairs of them fits into memory
NUM_BEFORE, NUM_NEW = 12, 40  # tokens of a text before the length, and in all; reads near the length are audited
pytestmark = pytest.mark.slow


def _default(family: str, name: str) -> int | None:
    """The length in a config that nobody has changed; None where it names none, or one that is too long to try."""
    fields = thresholds(family, 1)[name]
    config = getattr(transformers, FAMILIES[family].config)().get_text_config(decoder=True)
    field = "original_max_position_embeddings" if name == "longrope" else next(iter(fields))
    length = getattr(config, field, None)
    if not isinstance(length, int) or not 2 * NUM_NEW < length <= MOST_TOKENS:
        return None
    return length // fields[field] if field in fields and name == "window" else length


def _cases() -> list[Any]:
    cases = []
    for family in DRAFTED:
        for name in thresholds(family, 1):
            if name in SCALINGS and name != "longrope":
                continue  # by which reading does not change at a length
            length = _default(family, name)
            if length is not None:
                cases.append((family, name, length))
    return cases


@pytest.mark.parametrize(("family", "name", "length"), _cases())
def test_a_text_across_the_default_length_is_the_targets_own(family: str, name: str, length: int) -> None:
    ends = name == "positions"
    positions = {} if ends else thresholds(family, 2 * length).get("positions", {})  # as many as the text needs
    target = make_target(family, seed=7, **positions | thresholds(family, length)[name])
    prompt = make_prompt(length - (NUM_NEW + 1 if ends else NUM_BEFORE))
    options = {"max_new_tokens": NUM_NEW}
    plain = runs.plain(target, prompt, **options)
    state = torch.get_rng_state()

    drafter = InformedDrafter(RandomDrafter(12), plain.sequences, hit_rate=0.9)
    pair = runs.Pair(plain, runs.drafted(target, drafter, prompt, **options), state, torch.get_rng_state())

    pair.assert_equal(is_kept=False)
    if pair.stats.num_accepted == 0:  # then it is said why
        assert any("nothing is drafted" in note or "drafting ends" in note for note in pair.stats.notes), (
            pair.stats.notes
        )
