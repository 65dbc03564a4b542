"""The measurement of LoRA: a domain that is the same each time, stages that are done once, and a table at the end."""

import json
from pathlib import Path

import pytest

from benchmarks import lora as script
from benchmarks.orders import conversations
from transformers_falcon_spec.provenance import provenance


def test_the_domain_is_the_same_for_a_seed_and_no_question_comes_twice() -> None:
    rows = conversations(300, seed=1)

    questions = [row[0]["content"] for row in rows]
    assert rows == conversations(300, seed=1) != conversations(300, seed=2)
    assert len(set(questions)) == 300
    answers = {kind: [row[1]["content"] for row in rows if f"Write {kind}" in row[0]["content"]] for kind in
               ("this order as JSON", "SQL", "a table")}  # fmt: skip
    assert all(len(found) > 50 for found in answers.values())
    for answer in answers["this order as JSON"]:
        assert {"customer", "city", "by", "lines"} == set(json.loads(answer))


def test_a_stage_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    done: list[str] = []

    def fail() -> None:
        raise KeyboardInterrupt

    stages = script.Stages(tmp_path)
    stages.once("first", lambda: done.append("first"))
    with pytest.raises(KeyboardInterrupt):
        stages.once("second", fail)
    stages = script.Stages(tmp_path)
    for name in ("first", "second"):
        stages.once(name, lambda name=name: done.append(name))

    assert done == ["first", "second"]
    assert set(script.Stages(tmp_path).seconds) == {"first", "second"}


@pytest.mark.slow
def test_the_whole_way_in_small_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--tiny", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "lora.json")]

    script.main(line)
    monkeypatch.setattr(script, "run_command", None)  # nothing may be run again
    script.main(line)

    result = json.loads((tmp_path / "lora.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {script.BEFORE, *script.VARIANTS}
    assert rows["LoRA, rank 16"]["bytes"] < rows["all weights"]["bytes"] / 2
    assert all(found["num_identical"] == 2 for row in rows.values() for found in row["acceptance"].values())
    assert "| as published |" in script.REPORT.render(result, "lora.json")


def test_ways_to_adapt_a_drafter_stand_on_the_page_on_training() -> None:
    found = {"acceptance_length_interval": [2.0, 3.0], "num_identical": 39, "num_prompts": 40}
    nothing = {"num_trained": 0, "bytes": 0, "seconds": 0.0}
    rows = [
        {"name": "as published", "acceptance": {"greedy": {**found, "acceptance_length": 2.125}}, **nothing},
        {
            "name": "LoRA",
            "acceptance": {"greedy": {**found, "acceptance_length": 2.75}},
            "num_trained": 200_000,
            "bytes": 800_000,
            "seconds": 90.0,
        },
    ]
    sizes = {"tune_steps": 300, "rows": 800, "steps": 250, "prompts": 40, "per_device_train_batch_size": "8"}
    seconds = {"fine-tuning of the target": 500.0, "answers": 60.0, "features": 30.0, "LoRA": 100.0}
    result = {"provenance": {**provenance(seed=0), **sizes}, "stage_seconds": seconds, "rows": rows}

    text = script.REPORT.render(result, "lora.json")

    assert "| as published | 2.12 (2.00 to 3.00) | - | - | - |" in text
    assert "| LoRA | 2.75 (2.00 to 3.00) | 0.20 M | 0.8 MB | 1.5 min |" in text
    assert "78 of 80 texts are the target's own." in text
    assert "which all ways share, took 1.5 min." in text
    assert "`benchmarks/results/lora.json`" in text
