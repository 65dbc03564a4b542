"""Every example runs with `--tiny`: in seconds, on a CPU, without files or network."""

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
    "06_serve_ray.py": pytest.mark.ray,
    "07_side_by_side.py": pytest.mark.browser,
    "09_lm_eval.py": pytest.mark.harness,
    "10_grpo.py": pytest.mark.rollouts,
}  # need extras beyond `dev`
ALONE = {"01_generate.py", *HEAVY}
SAID = {
    "04_easyspec.py": "groups [[0], [1], [2, 3], [4]]: the same text",
    "05_diffuspec.py": "the same text as the target alone",
    "06_serve_ray.py": "'completion_tokens': 16,",
    "07_side_by_side.py": "as fast, the same text",
    "08_score_texts.py": "the same texts",
    "09_lm_eval.py": "the same texts and scores",
    "10_grpo.py": "16 of 16 rollouts are the text of the target alone",
}


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.name not in ALONE], ids=lambda path: path.name)
@pytest.mark.usefixtures("machine_clock")
def test_an_example_runs_tiny(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # what it writes by default goes below here
    monkeypatch.syspath_prepend(str(example.parent))
    monkeypatch.setattr(sys, "argv", [str(example), "--tiny"])

    runpy.run_path(str(example), run_name="__main__")

    assert SAID.get(example.name, "") in capsys.readouterr().out


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=HEAVY.get(path.name, ()), id=path.name) for path in EXAMPLES if path.name in ALONE],
)
def test_an_example_runs_tiny_in_a_process_of_its_own(example: Path, tmp_path: Path) -> None:
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
def test_an_example_names_its_command(example: Path) -> None:
    header = example.read_text(encoding="utf-8").split('"""')[1]

    assert f"python examples/{example.name}" in header


def test_examples_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
