"""Replays of long texts: their steps are those of `generate`, and rows beside each other are of the same answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.long_texts import LongText, replayed, rows_of, ways_to_draft
from transformers_falcon_spec.commands.loading import load_drafter, load_target

MODELS = Path(__file__).parents[2] / "models"


def test_a_replay_takes_the_steps_that_generate_takes() -> None:
    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    drafter = load_drafter(str(MODELS / "falcon-reference"), target)
    drafter.generation_config.tune = False
    prompt = tokenizer("What is 12 plus 7? Explain it step by step.", return_tensors="pt").input_ids
    ways = ways_to_draft({"falcon": drafter}, [24])

    for name, way in ways.items():
        asked = {"assistant_model": way, "do_sample": False, "return_dict_in_generate": True, "min_new_tokens": 48}
        out = target.generate(prompt, max_new_tokens=48, **asked)
        is_answer = [position >= prompt.shape[1] for position in range(out.sequences.shape[1])]
        # the first token comes from reading the prompt, before any draft
        is_answer[prompt.shape[1]] = False
        (turn,) = replayed(target, LongText(out.sequences, is_answer), {name: way})["turns"]

        assert out.speculation.num_accepted > 10
        assert turn["num_steps"] == {name: out.speculation.num_steps}
        assert (turn["start"], turn["num_tokens"]) == (prompt.shape[1] + 1, 47)


def test_a_row_compares_windows_on_the_answers_that_start_in_its_bin() -> None:
    def turn(start: int, whole: int, window: int) -> dict[str, Any]:
        steps = {"a, whole text": whole, "a, 8": window}
        return {"start": start, "num_tokens": 12, "nats": 6.0, "num_steps": steps}

    records = [
        {"reading": "own", "turns": [turn(0, 6, 6), turn(16, 6, 6)]},
        {"reading": "own", "turns": [turn(17, 6, 4)]},
    ]

    first, second = rows_of(records, ["a"], [8], [16, 32, 64])

    assert (first["from"], first["to"], first["num_turns"], first["whole"], first["nats"]) == (0, 16, 2, 2.0, 0.5)
    assert first["window 8"] == {"length": 2.0, "gain": 0.0, "interval": (0.0, 0.0)}
    assert (second["from"], second["to"], second["num_turns"], second["whole"]) == (16, 32, 1, 2.0)
    assert second["window 8"]["gain"] == pytest.approx(0.5)


@torch.no_grad()
def test_prompts_between_answers_are_read_and_not_counted() -> None:
    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    drafter = load_drafter(str(MODELS / "falcon-reference"), target)
    ids = tokenizer("One two three four five six seven eight nine ten eleven twelve", return_tensors="pt").input_ids
    is_answer = [4 <= position < 8 or position >= 11 for position in range(ids.shape[1])]

    turns = replayed(target, LongText(ids, is_answer), {"falcon": drafter})["turns"]

    assert [(turn["start"], turn["num_tokens"]) for turn in turns] == [(4, 4), (11, ids.shape[1] - 11)]
    assert all(0 < turn["num_steps"]["falcon"] <= turn["num_tokens"] for turn in turns)
