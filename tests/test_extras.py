"""What `pip install .` brings is enough for `generate` and help; whatever needs more says which extra brings it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformers_falcon_spec.errors import OptionError, naming_extras

pytestmark = pytest.mark.commands  # each starts a process

ROOT = Path(__file__).parents[1]

# Hides packages from Python, and from those who ask whether they are installed.
BARE = """
import sys

HIDDEN = {"accelerate", "datasets", "evaluate", "fastapi", "peft", "pydantic", "rich", "starlette", "tensorboard", "uvicorn"}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        search = getattr(self.finder, "find_distributions", None)
        return [] if search is None else search(context)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
GENERATES = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_falcon_spec import load_drafter

target = AutoModelForCausalLM.from_pretrained("models/reference-target")
inputs = AutoTokenizer.from_pretrained("models/reference-target")("What is 3 plus 4?", return_tensors="pt")
drafter = load_drafter("models/falcon-reference", target)
text = target.generate(**inputs, assistant_model=drafter, max_new_tokens=4, do_sample=False)
alone = target.generate(**inputs, max_new_tokens=4, do_sample=False)
assert text.tolist() == alone.tolist()
"""
COMMANDS = """
from transformers_falcon_spec.cli import main

assert main(["--help"]) == 0
HIDDEN.remove("rich")  # which `pip install .` brings
asked = ["generate", "--target", "models/reference-target", "--drafter", "models/falcon-reference", "--compare"]
asked += ["--prompts", "examples/prompts.jsonl", "--limit", "1", "--max_new_tokens", "4"]
assert main(asked) == 0
HIDDEN.add("rich")
"""
ASKS = """
print(main(["train", "--target", "models/reference-target", "--data", "x.jsonl"]))
print(main(["serve", "--target", "models/reference-target", "--drafter", "models/falcon-reference"]))
from transformers_falcon_spec import DrafterTrainer
"""
TRAINS = """
HIDDEN -= {"accelerate", "rich"}
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_falcon_spec import DrafterTrainer

target = AutoModelForCausalLM.from_pretrained("models/reference-target")
tokenizer = AutoTokenizer.from_pretrained("models/reference-target")
turns = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
tokens = {"input_ids": [1, 2, 3], "assistant_mask": [0, 1, 1]}
for rows in ([{"messages": turns}], [tokens], "rows.csv"):
    try:
        DrafterTrainer(target=target, train_dataset=rows, processing_class=tokenizer)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def run_bare(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script where nothing of the extras is installed."""
    command = [sys.executable, "-c", BARE + script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)


def test_without_any_extra_texts_are_written_and_what_needs_one_says_which() -> None:
    """From Python and by commands, in one process: each start takes seconds."""
    done = run_bare(GENERATES + COMMANDS + ASKS)

    assert "falcon-spec COMMAND" in done.stdout, done.stderr
    assert done.stdout.endswith("\n1\n1\n"), done.stderr
    sentence = r'This needs the package `(\w+)`, which is not installed. Run `pip install "transformers_falcon_spec\[(\w+)\]"`\.'
    assert re.findall(sentence, done.stderr) == [
        ("accelerate", "train"),
        ("uvicorn", "serve"),
        ("accelerate", "train"),
    ]
    assert done.stderr.count("Traceback") == 2  # of the name alone, and of what it came from


def test_rows_of_a_trainer_name_the_extra_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\nWhat is 2 + 3?,5\n", encoding="utf-8")
    done = run_bare(TRAINS.replace("rows.csv", str(tmp_path / "rows.csv")))

    assert done.returncode == 0, done.stderr
    sentence = 'This needs the package `datasets`, which is not installed. Run `pip install "transformers_falcon_spec[train]"`.'
    assert done.stdout == 3 * f"OptionError: {sentence}\n"


def test_a_missing_package_that_is_in_no_extra_is_left_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), naming_extras():
        raise ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package")


def test_a_part_of_a_package_is_asked_for_as_the_whole() -> None:
    with (
        pytest.raises(
            OptionError, match=r'package `datasets`, .* Run `pip install "transformers_falcon_spec\[train\]"`'
        ),
        naming_extras(),
    ):
        raise ModuleNotFoundError("No module named 'datasets.utils'", name="datasets.utils")
