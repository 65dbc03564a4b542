"""EleutherAI's harness scores a target with a drafter as it scores the target alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.harness

ROOT = Path(__file__).parents[2]
TASK = """
task: solutions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 32, do_sample: false}}
metric_list: [{{metric: chrf}}]
"""


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_task_has_the_texts_and_scores_of_the_target_alone(batch_size: int, tmp_path: Path) -> None:
    rows = (ROOT / "tests" / "data" / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(TASK.format(rows=json.dumps(str(tmp_path / "rows.jsonl"))), encoding="utf-8")

    result = subprocess.run(
        [
            sys.executable,
            "examples/09_lm_eval.py",
            "--task",
            str(tmp_path / "task.yaml"),
            "--batch-size",
            str(batch_size),
        ],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,  # a machine may be busy
    )

    assert result.returncode == 0, result.stderr[-3000:]
    alone, drafted, verdict = result.stdout.splitlines()
    assert verdict == "the same texts and scores"
    found = [re.fullmatch(r".*chrf,none ([\d.]+); .* (\d+) of them kept", line) for line in (alone, drafted)]
    (score, num_kept), (drafted_score, num_kept_drafted) = (match.groups() for match in found if match)
    assert score == drafted_score != "0.000"
    assert int(num_kept) == 0 < int(num_kept_drafted)
