"""Two real processes give the results of one, in evaluation, whose prompts they share, and in training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.processes import run_two
from tests.training.runs import make_dataset, make_trainer, still_phases
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training

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
def test_two_processes_report_what_one_reports(tmp_path: Path) -> None:
    run_two(SCRIPT, tmp_path, json.dumps(DECODING))

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[2] == second[2] == {"num_processes": 2}
    alone = make_trainer(tmp_path, eval_decode_prompts=3, **DECODING).evaluate()
    names = [name for name in alone if not name.endswith(("time", "_per_second"))]
    assert {"eval_loss", "eval_accuracy", "eval_acceptance_length"} < set(names)
    assert [first[0][name] for name in names] == pytest.approx([alone[name] for name in names])  # none of 6 rows twice
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one["eval_acceptance_length"] == other["eval_acceptance_length"] >= 1


ROWS_PER_STEP, NUM_STEPS = 8, 50
TRAINING = """
import json, sys
from pathlib import Path
from tests.training.test_processes import curve

found, trainer = curve(Path(sys.argv[1]), num_processes=2)
assert trainer.accelerator.num_processes == 2
assert trainer.args.world_size == 2
Path(sys.argv[1], f"curve-{trainer.args.process_index}.json").write_text(json.dumps(found))
"""


def curve(folder: Path, num_processes: int) -> tuple[list[list[float]], DrafterTrainer]:
    """Loss and divergence of every step, of as many rows for any number of processes; only their order is random."""
    trainer = make_trainer(
        folder,
        {"block_size": 2, "recurrence": "token", "transition_rank": 8, "recurrent_dropout": 0.0},
        train_dataset=make_dataset(3 * ROWS_PER_STEP),  # an epoch ends with a whole step
        max_steps=NUM_STEPS,
        per_device_train_batch_size=ROWS_PER_STEP // num_processes,
        use_glancing=False,
        feature_noise=0.0,
        logging_steps=1,
    )
    with still_phases():
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry["loss"], entry["divergence"]] for entry in logged], trainer


@pytest.mark.slow  # two processes that start from nothing
def test_two_processes_learn_what_one_learns_from_the_same_rows_a_step(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run_two(TRAINING, tmp_path)

    shared = json.loads((tmp_path / "curve-0.json").read_text())
    alone, _ = curve(tmp_path / "alone", num_processes=1)
    differences = (torch.tensor(shared) / torch.tensor(alone) - 1).abs()  # [steps, 2]
    record_property("largest relative differences of loss and divergence", differences.amax(0).tolist())
    assert len(alone) == NUM_STEPS
    assert alone[-1][0] < 0.7 * alone[0][0]
    assert differences.max() < 1e-3
