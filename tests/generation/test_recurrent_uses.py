"""Targets with recurrent layers in every use of `generate`: what comes out is what plain decoding gives."""

from itertools import product

import pytest

from tests import hybrids
from tests.families import CHAINS, MIXERS
from tests.pairs import in_turn
from tests.tiny import in_double, make_target

# Each kind in each use with one drafter: as the uses are odd in number, each use has both.
USED = [(*case, knows) for case, knows in in_turn(product(MIXERS, hybrids.USES), hybrids.DRAFTERS)]


@pytest.mark.parametrize(("family", "use", "knows"), USED)
def test_every_use_gives_what_plain_decoding_gives(family: str, use: str, knows: str) -> None:
    outcome = hybrids.USES[use](in_double(make_target(family, seed=7)), 3, hybrids.DRAFTERS[knows])

    assert outcome.is_same
    if use == "batch" and family in CHAINS:
        return  # rows are read plainly
    assert outcome.stats.num_drafted > 0
    assert knows == "random" or outcome.stats.acceptance_length > 2
