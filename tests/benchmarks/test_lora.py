"""The measurement of LoRA: a domain that is the same each time, stages that are done once, and a table at the end."""

import json
from pathlib import Path

import pytest

from benchmarks import lora as script
from benchmarks.orders import conversations
from transformers_falcon_spec.evaluation.adaptation_table import adaptation


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
    assert set(rows) == {script.BEFORE, *script.ARMS}
    assert rows["LoRA, rank 16"]["bytes"] < rows["all weights"]["bytes"] / 2
    assert all(found["num_identical"] == 2 for row in rows.values() for found in row["acceptance"].values())
    assert "| as published |" in adaptation(result, "lora.json")
