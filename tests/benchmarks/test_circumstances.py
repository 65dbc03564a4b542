"""The tuner beside fixed sizes: what is written, what is compared with what, and that an interrupted run goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import circumstances as script
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.tuning_tables import circumstances

RUNS = [
    {"target alone": 4.0, "4 nodes, 1 passes": 2.0, "8 nodes, 1 passes": 3.0, "tuned": 2.5},
    {"target alone": 4.0, "4 nodes, 1 passes": 3.0, "8 nodes, 1 passes": 4.0, "tuned": 2.5},
]


def test_prompts_are_as_long_as_fits_and_each_question_is_asked_once() -> None:
    tokenizer = AutoTokenizer.from_pretrained("models/reference-target")
    questions = [f"How many apples are {number} apples?" for number in range(40)]
    prompts = [Prompt("set", str(number), (("user", text),)) for number, text in enumerate(questions)]

    batches = list(script.packed(prompts, tokenizer, 80, 2))

    lengths = [int(length) for _, mask in batches for length in mask.sum(-1)]
    assert len(batches) >= 2
    assert all(60 < length <= 80 for length in lengths)
    texts = [tokenizer.decode(row) for ids, _ in batches for row in ids]
    asked = [question for question in questions for text in texts if question in text]
    assert len(asked) == len(set(asked)) > 5


def test_the_tuner_is_compared_with_the_best_of_all_batches_together() -> None:
    found = script.compared(RUNS)

    assert found["best"] == "4 nodes, 1 passes"
    assert found["speedups"] == {"4 nodes, 1 passes": 8 / 5, "8 nodes, 1 passes": 8 / 7, "tuned": 8 / 5}
    assert found["tuned_beside_best"] == 1.0
    assert found["tuned_beside_best_interval"] == (2.0 / 2.5, 3.0 / 2.5)


def test_batches_that_were_written_are_not_written_again(tmp_path: Path) -> None:
    batches: Any = [(torch.zeros(1, 1), torch.ones(1, 1))] * 4
    written: list[int] = []

    def write(number: int, _batch: Any) -> dict[str, Any]:
        written.append(number)
        if len(written) == 3:
            raise KeyboardInterrupt
        return {"is_identical": True, "run": RUNS[0]}

    path = tmp_path / "circumstances.jsonl"
    with pytest.raises(KeyboardInterrupt):
        script.measured({"rows": 1}, batches, Records(path, {}), write)
    done = script.measured({"rows": 1}, batches, Records(path, {}), write)

    assert written == [0, 1, 2, 0, 2, 3]  # the first one warms up
    assert len(done) == 3
    assert script.measured({"rows": 2}, batches[:1], Records(path, {}), write) == []


def test_the_report_says_what_was_best() -> None:
    origin = {"shape": "None", "dtype": "float32", "command": "c", "commit": "0" * 40}
    row = {"threads": 2, "rows": 1, "context": 64, "num_batches": 2, "num_identical": 2, **script.compared(RUNS)}
    text = circumstances({"provenance": {**script.provenance(seed=0), **origin}, "rows": [row]}, "circumstances.json")

    assert "| 2 | 1 | 64 | 4 nodes, 1 passes: 1.60x | 1.60x (1.60 to 1.60) | 1.00 (0.80 to 1.20) | 2 of 2 |" in text
