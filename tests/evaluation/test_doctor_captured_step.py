"""The doctor says which parts of a step can be captured, and of each other part why it cannot."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.evaluation.doctor import CAPTURED, NOTES, check_captured_step
from transformers_falcon_spec.generation.capture import graph

ON_A_CPU = {**CAPTURED, "capture": "nothing is captured on a CPU"}


def test_a_pair_that_can_do_all_of_it_is_said_to() -> None:
    target = make_target()
    drafter = make_drafter(target)
    target.generation_config.update(do_sample=True, temperature=0.8, repetition_penalty=1.1)
    random_state, options = torch.get_rng_state(), drafter.generation_config.to_dict()

    section = check_captured_step(target, drafter, make_prompt())

    assert section == {"can_be_captured": True, **ON_A_CPU}
    assert torch.get_rng_state().equal(random_state)
    assert drafter.generation_config.to_dict() == options


def _no_trees(_: pytest.MonkeyPatch) -> tuple[Any, Any]:
    target = make_target("bloom")
    return target, make_drafter(target)


def _drafts_of_text(_: pytest.MonkeyPatch) -> tuple[Any, Any]:
    target = make_target()
    return target, LookaheadDrafter.from_target(target)


def _processor_of_text(_: pytest.MonkeyPatch) -> tuple[Any, Any]:
    target = make_target()
    target.generation_config.no_repeat_ngram_size = 3
    return target, make_drafter(target)


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(graph, "is_captured", lambda _: True)
    monkeypatch.setattr(graph, "capture", fails)
    target = make_target()
    return target, make_drafter(target)


@pytest.mark.parametrize(
    ("pair", "part", "reason", "can_be_captured"),
    [
        (_no_trees, "target", "`capture=True` needs .* captured, but the target cannot read trees.", False),
        (_drafts_of_text, "drafter", "a `LookaheadCandidateGenerator` drafts in shapes that follow the text.", False),
        (_processor_of_text, "choice", "the logits processor `NoRepeatNGramLogitsProcessor` is not known.*", False),
        (_no_memory, "capture", r"CUDA out of memory\.", True),
    ],
    ids=["target", "drafter", "choice", "capture"],
)
def test_a_part_that_cannot_is_told_with_the_reason(
    pair: Callable[[pytest.MonkeyPatch], tuple[Any, Any]],
    part: str,
    reason: str,
    can_be_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = check_captured_step(*pair(monkeypatch), make_prompt())

    assert section["can_be_captured"] is can_be_captured
    assert section[part] is not None
    assert re.fullmatch(reason, section[part])
    others = {name: text for name, text in ON_A_CPU.items() if name != part and section[name] is not None}
    assert {name: section[name] for name in others} == others


def test_every_note_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

    explained = re.findall(r'^\| "(.+?): \.\.\." \|', page.partition("\n## Notes on steps\n")[2], flags=re.MULTILINE)

    assert explained == list(NOTES)
