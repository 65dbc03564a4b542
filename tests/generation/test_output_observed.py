"""Watching steps: observers see what was drafted and kept, and change nothing."""

import pytest

from tests import runs
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.generation.output import observe_steps

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}


@pytest.mark.parametrize("capture", [False, True])
def test_observers_see_every_step_and_change_nothing(capture: bool) -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.capture = capture
    tokens: list[int] = []

    with observe_steps(lambda _, paths: tokens.extend(paths[0].token_ids)):
        pair = runs.both(target, drafter, **SAMPLING)

    pair.assert_equal()
    prompt_len = pair.drafted.sequences.shape[1] - 24
    assert tokens == pair.drafted.sequences[0, prompt_len + 1 :].tolist()  # the prefill gave the first
