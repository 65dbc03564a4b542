"""Every example runs with `--tiny`: in seconds, on a CPU, without files or network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_tiny(example: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(example), "--tiny"],
        cwd=tmp_path,  # what it writes by default goes below here
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_what_it_is_for_and_what_it_takes(example: Path) -> None:
    header = example.read_text(encoding="utf-8").split('"""')[1]

    needed = [f"python examples/{example.name}", "Hardware and time:", "`--tiny`"]
    assert [words for words in needed if words not in header] == []


def test_there_are_examples() -> None:
    assert EXAMPLES
