"""A target whose forward is compiled drafts as an interpreted one, and is told that hooks may not fire."""

import pytest
import torch

from tests import runs
from tests.tiny import make_drafter, make_target

pytestmark = pytest.mark.families  # Dynamo is imported and compiles: seconds


@pytest.mark.parametrize(("is_warm", "is_known"), [(False, True), (True, False)])
def test_a_compiled_forward(is_warm: bool, is_known: bool) -> None:
    interpreted, target = (make_target(num_hidden_layers=1).double() for _ in range(2))  # Dynamo takes seconds a layer
    drafter = make_drafter(target, block_size=2, feature_layers=[0, -1]).double()
    drafter.generation_config.tune = False
    expected = runs.drafted(interpreted, drafter)
    if is_known:
        runs.drafted(target, drafter)
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    if is_warm:  # compiled without hooks, so that hooks set later do not fire
        runs.plain(target)

    drafted = runs.drafted(target, drafter)

    assert drafted.sequences.equal(expected.sequences)
    assert drafted.speculation.acceptance_histogram == expected.speculation.acceptance_histogram
    assert any("Hooks may not fire" in note for note in drafted.speculation.notes)
