"""Two real processes: an evaluation shares its prompts out, waits for nobody for ever, and tells what one process tells."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import make_trainer

DECODING = {"eval_decode_tokens": 8, "draft_tree_nodes": 6}
SCRIPT = """
import json, sys
from pathlib import Path
from tests.training.runs import make_trainer

found = []
for num_prompts in (3, 1):  # of one, the second process gets none
    trainer = make_trainer(Path(sys.argv[1]), eval_decode_prompts=num_prompts, max_steps=2, **json.loads(sys.argv[2]))
    if num_prompts == 1:
        trainer.train()  # the drafter is wrapped now
    found.append(trainer.evaluate())
found.append({"num_processes": trainer.accelerator.num_processes})
Path(sys.argv[1], f"{trainer.args.process_index}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow  # two processes that start from nothing
def test_two_processes_tell_what_one_tells(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])

    command = [*launch, str(tmp_path / "script.py"), str(tmp_path), json.dumps(DECODING)]
    subprocess.run(command, env=environment, check=True, timeout=300)

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[2] == second[2] == {"num_processes": 2}
    alone = make_trainer(tmp_path, eval_decode_prompts=3, **DECODING).evaluate()
    names = [name for name in alone if "acceptance" in name]
    assert len(names) >= 2
    assert [first[0][name] for name in names] == pytest.approx([alone[name] for name in names])
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one["eval_acceptance_length"] == other["eval_acceptance_length"] >= 1
        assert one["eval_speedup"] == other["eval_speedup"]
