"""A call goes on where something fails within a text: a drafted token overflows, or the drafter finds no memory."""

from typing import Any

import pytest
import torch
from torch import nn

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import every_drafter
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.generation.drafting import NO_DRAFTS
from transformers_falcon_spec.generation.output import READ_ANEW


def _overflowing(
    family: str = "llama", num_rows: int = 1, share: int = 4, **options: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A target, a prompt and what the target writes after it; every `share`th token that is not in there overflows."""
    target = in_double(make_target(family))
    head = target.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # not tied, so that nothing else overflows
    prompt = torch.cat([make_prompt(seed=row) for row in range(num_rows)])
    written = runs.drafted(target, RandomDrafter(), prompt, **options).sequences  # probed before anything overflows
    unused = sorted(set(range(target.config.vocab_size)) - set(written.flatten().tolist()))
    with torch.no_grad():
        target.get_input_embeddings().weight[unused[::share]] = float("inf")
    return target, prompt, written


OVERFLOWING: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 1, {}),
    ("gemma3", 3, {}),
    ("llama", 1, {"do_sample": True}),
    ("llama", 1, {"do_sample": True, "repetition_penalty": 3.0}),
]


@pytest.mark.parametrize(
    ("family", "num_rows", "options", "capture"),
    [
        *((*case, capture) for case in OVERFLOWING for capture in (False, True)),
        ("lfm2", 1, {}, False),  # steps of recurrent targets are not captured
    ],
)
def test_a_drafted_token_that_overflows_changes_no_other_score(
    family: str, num_rows: int, options: Any, capture: bool
) -> None:
    target, prompt, written = _overflowing(family, num_rows, **options)
    drafter = InformedDrafter(RandomDrafter(tune=False), written)
    drafter.generation_config.capture = capture

    pair = runs.both(target, drafter, prompt, **options)

    assert pair.plain.sequences.equal(written)
    pair.assert_equal()
    assert pair.stats.notes.count(READ_ANEW) == 1


@pytest.mark.parametrize("capture", [False, True])
def test_a_target_that_overflows_by_itself_is_read_anew_once(capture: bool) -> None:
    target = in_double(make_target())
    prompt = make_prompt()
    with torch.no_grad():
        target.get_input_embeddings().weight[runs.plain(target, prompt).sequences[0, prompt.shape[1] + 4]] = float(
            "nan"
        )
    drafter = InformedDrafter(RandomDrafter(tune=False), runs.plain(target, prompt).sequences)
    drafter.generation_config.capture = capture

    pair = runs.both(target, drafter, prompt)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_accepted > 0
    assert pair.stats.notes.count(READ_ANEW) == 1


@pytest.mark.parametrize("capture", [False, True])
def test_a_row_that_overflows_by_itself_hides_no_draft_that_overflows_in_another(capture: bool) -> None:
    target, prompt, written = _overflowing(num_rows=2)
    first, second = written[:, prompt.shape[1] + 4 :].tolist()
    with torch.no_grad():
        target.get_input_embeddings().weight[next(token for token in first if token not in second)] = float("nan")
    drafter = InformedDrafter(RandomDrafter(tune=False), runs.plain(target, prompt).sequences)
    drafter.generation_config.capture = capture

    pair = runs.both(target, drafter, prompt)

    pair.assert_equal()
    assert pair.stats.notes.count(READ_ANEW) == 1


def test_lookahead_starts_another_window_where_one_overflowed() -> None:
    target, prompt, _ = _overflowing(share=1)
    drafter = LookaheadDrafter.from_target(target, window_size=3, ngram_len=3)
    drafter.generation_config.tune = False

    pair = runs.both(target, drafter, prompt)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes.count(READ_ANEW) == 1


@pytest.mark.parametrize("capture", [False, True])
def test_a_drafter_without_memory_leaves_the_rest_to_the_target(
    capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = in_double(make_target())
    drafter = every_drafter("falcon", target)
    drafter.generation_config.capture, drafter.generation_config.tune = capture, False
    make, asked = drafter.candidate_generator, []

    def made(*arguments: Any) -> Any:
        generator = make(*arguments)
        propose = generator.propose

        def proposed(budget: Any) -> Any:
            asked.append(budget)
            if len(asked) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return propose(budget)

        generator.propose = proposed
        return generator

    monkeypatch.setattr(type(drafter), "candidate_generator", lambda _, *arguments: made(*arguments))

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert len(asked) == 3
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes.count(NO_DRAFTS) == 1
