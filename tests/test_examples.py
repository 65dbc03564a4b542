"""Every example runs with `--tiny`: in seconds, on a CPU, without files or network."""

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/[0-9]*.py"))
HEAVY = {
    "08_serve_ray.py": pytest.mark.ray,
    "09_side_by_side.py": pytest.mark.browser,
    "11_lm_eval.py": pytest.mark.harness,
}  # need extras beyond `dev`
SAID = {
    "05_easyspec.py": "groups [[0], [1], [2, 3], [4]]: the same text",
    "06_diffuspec.py": "the same text as the target alone",
    "08_serve_ray.py": "'completion_tokens': 16,",
    "09_side_by_side.py": "as fast, the same text",
    "10_score_texts.py": "the same texts",
    "11_lm_eval.py": "the same texts and scores",
}


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=HEAVY.get(path.name, ()), id=path.name) for path in EXAMPLES],
)
def test_an_example_runs_tiny(example: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example), "--tiny"],
        cwd=tmp_path,  # what it writes by default goes below here
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,  # a machine may be busy
    )

    assert result.returncode == 0, result.stderr[-3000:]
    assert SAID.get(example.name, "") in result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_what_it_is_for_and_what_it_takes(example: Path) -> None:
    header = example.read_text(encoding="utf-8").split('"""')[1]

    needed = [f"python examples/{example.name}", "Hardware and time:", "`--tiny`"]
    assert [words for words in needed if words not in header] == []


def test_the_training_mix_holds_no_evaluation_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "Janet sells 16 eggs a day; how much does she make of them in a week of seven days?"
    rows = {"mt_bench": {"turns": ["one", asked]}, "humaneval": {"prompt": "two"}, "gsm8k_test": {"question": "three"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    questions = [f"Answer: {asked.upper()}", "THREE!", "How many eggs are there in a week?"]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "7"}] for text in questions]
    with gzip.open(tmp_path / "math.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"source": "gsm8k", "messages": talk}) + "\n" for talk in talks)
    options = {"mix": tmp_path, "evaluation": tmp_path, "output": tmp_path, "per-kind": 5, "held-out": 0}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["02_training_mix.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    runpy.run_path(str(ROOT / "examples" / "02_training_mix.py"), run_name="__main__")

    kept = [json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text("utf-8").splitlines()]
    assert [talk for talk in kept if talk in talks] == talks[2:]


def test_there_are_examples() -> None:
    assert EXAMPLES
