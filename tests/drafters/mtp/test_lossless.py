"""The promise with an MTP drafter: the text is the target's own, greedy and sampled, alone, in a batch and in fixed shapes."""

from pathlib import Path

import pytest

from tests import runs
from tests.batches import batch_and_drafted
from tests.drafters.mtp.makers import KINDS, OTHERS, loaded, saved
from tests.pairs import in_turn
from tests.tiny import make_prompt
from transformers_falcon_spec import MtpDrafter, SpeculationConfig

pytestmark = pytest.mark.families

MODES = {"greedy": {}, "sampling": runs.SAMPLING}


@pytest.mark.parametrize(("kind", "mode"), [*in_turn(KINDS, MODES), ("mellum", "sampling")])
def test_the_text_is_the_targets_own(kind: str, mode: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, kind))
    drafter = MtpDrafter.from_target(target)

    alone = runs.both(target, drafter, max_new_tokens=12, **MODES[mode])
    informed = runs.informed(target, drafter, max_new_tokens=40, **MODES[mode])

    alone.assert_equal(is_kept=False)
    informed.assert_equal()
    assert alone.stats.num_drafted > 0
    assert informed.stats.acceptance_length > 2  # paths were kept, and drafting went on from them


@pytest.mark.parametrize("options", [{}, {"dynamic_tree": False, "tree_depth": 4}, {"prompt_lookup_num_tokens": 5}])
def test_rows_are_those_of_a_plain_batch(options: dict[str, int], tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, "mellum"))
    drafter = MtpDrafter.from_target(target)
    drafter.generation_config = SpeculationConfig(**options)

    pair = batch_and_drafted(target, drafter, lengths=(12, 5), max_new_tokens=30)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5


@pytest.mark.parametrize("kind", OTHERS)
def test_drafts_in_fixed_shapes_leave_the_text_as_it_is(kind: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, kind))
    drafter = MtpDrafter.from_target(target)
    drafter.generation_config = SpeculationConfig(capture=True)

    pair = runs.both(target, drafter, max_new_tokens=40)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > pair.stats.num_steps
    assert pair.stats.notes == []


@pytest.mark.parametrize("verifier", ["recursive_rejection", "traversal", "gumbel"])
def test_every_rule_writes(verifier: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, "mellum"))
    drafter = MtpDrafter.from_target(target)
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    out = runs.drafted(target, drafter, make_prompt(6).repeat(2, 1), do_sample=True, temperature=0.8)

    assert out.sequences.shape == (2, 30)
    assert out.speculation.num_drafted > 0


@pytest.mark.parametrize("kind", OTHERS)
def test_stock_drafts_with_the_layer_write_the_same_text_beside_the_patch(kind: str, tmp_path: Path) -> None:
    target = loaded(saved(tmp_path, kind))

    stock = runs.plain(target, use_mtp=True)

    assert stock.sequences.tolist() == runs.plain(target).sequences.tolist()
    assert not hasattr(stock, "speculation")
