"""The mix from which the pair in `models/` learned."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from lab import training_mix
from lab.training_mix import main


def test_the_training_mix_holds_no_evaluation_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "Janet sells 16 eggs a day; how much does she make of them in a week of seven days?"
    rows = {"mt_bench": {"turns": ["one", asked]}, "humaneval": {"prompt": "two"}, "gsm8k_test": {"question": "three"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    questions = [f"Answer: {asked.upper()}", "THREE!", "How many eggs are there in a week?"]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "7"}] for text in questions]
    with gzip.open(tmp_path / "math.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"source": "gsm8k", "messages": talk}) + "\n" for talk in talks)
    options = {"mix": tmp_path, "evaluation": tmp_path, "output": tmp_path}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["training_mix.py", *arguments])
    monkeypatch.setattr(training_mix, "PER_KIND", 5)
    monkeypatch.setattr(training_mix, "HELD_OUT", 0)

    main()

    kept = [json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text("utf-8").splitlines()]
    assert [talk for talk in kept if talk in talks] == talks[2:]


def test_a_trial_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training_mix.py", "--tiny", "--output", str(tmp_path)])

    main()

    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "held_out.jsonl"}
