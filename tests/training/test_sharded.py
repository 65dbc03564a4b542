"""FSDP2 on two real processes (gloo): each holds half of the drafter, and they learn what one process learns."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.chat import make_rows, save_target, write_rows
from tests.tiny import make_drafter, make_target
from tests.training.processes import run_two
from tests.training.runs import QUIET, SMALL, example_batch, still_phases
from transformers_falcon_spec import FalconSpecDrafter, cli
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.objectives import objective_of

pytestmark = pytest.mark.training

NUM_STEPS, NUM_ROWS = 4, 4
FORMS = {
    "token": {"block_size": 3, "recurrence": "token", "shortcut": True, "transition_rank": 8},
    "sequence": {"block_size": 2, "recurrence": "sequence"},
}
SHARDED = """
import json, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tests.training.test_sharded import FORMS, learn, make_pair

torch.distributed.init_process_group("gloo")
rank, folder = torch.distributed.get_rank(), Path(sys.argv[1])
assert torch.distributed.get_world_size() == 2
for name, form in FORMS.items():
    target, drafter = make_pair(form)
    for layer in drafter.layers:
        fully_shard(layer)
    fully_shard(drafter)
    assert all(isinstance(weight, DTensor) for weight in drafter.parameters())
    losses = torch.tensor(learn(target, drafter, slice(rank, None, 2)))
    torch.distributed.all_reduce(losses)
    state = get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        drafter.save_pretrained(folder / name, state_dict=state)
        (folder / f"{name}.json").write_text(json.dumps((losses / 2).tolist()))
torch.distributed.destroy_process_group()
"""


def make_pair(form: dict[str, object]) -> tuple[nn.Module, nn.Module]:
    target = make_target(**SMALL)
    return target, make_drafter(target, attention_bias=False, recurrent_dropout=0.0, **form).train()


def learn(target: nn.Module, drafter: nn.Module, rows: slice) -> list[float]:
    """The loss of each of a few steps on these rows of batches whose rows count the same."""
    args = DrafterTrainingArguments("unused", use_glancing=False, feature_noise=0.0, **QUIET)
    kind = objective_of(drafter)
    features = kind.read_target(drafter, target)
    objective = kind(drafter, features, args)
    optimizer = torch.optim.SGD([w for w in drafter.parameters() if w.requires_grad], lr=0.1, momentum=0.9)
    losses, batches = [], [example_batch(NUM_ROWS, seed=step) for step in range(NUM_STEPS)]
    with still_phases():
        for whole in batches:
            batch = {name: value[rows] for name, value in whole.items()}
            loss = objective(drafter, features(batch), torch.Generator().manual_seed(0), 0.0).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.slow  # two processes that start from nothing
def test_a_sharded_drafter_learns_as_one_process_does_and_is_saved_complete(tmp_path: Path) -> None:
    run_two(SHARDED, tmp_path)

    for name, form in FORMS.items():
        target, drafter = make_pair(form)
        before = {part: value.clone() for part, value in drafter.state_dict().items()}
        losses = learn(target, drafter, slice(None))
        loaded = FalconSpecDrafter.from_pretrained(tmp_path / name).state_dict()
        assert json.loads((tmp_path / f"{name}.json").read_text()) == pytest.approx(losses, rel=1e-5)
        assert losses[-1] < losses[0]
        assert any(not value.equal(before[part]) for part, value in loaded.items())
        torch.testing.assert_close(loaded, drafter.state_dict(), rtol=1e-4, atol=1e-5)


# accelerate uses FSDP for devices only, and DDP for CPUs. If it believes that there are devices, it shards on gloo,
# too.
THROUGH_ACCELERATE = """
import sys
from pathlib import Path
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from tests.training.runs import still_phases
from transformers_falcon_spec import cli
from transformers_falcon_spec.training.trainer import DrafterTrainer

begin = PartialState.__init__
def with_devices(state, *args, **kwargs):
    begin(state, *args, **kwargs)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
PartialState.__init__ = with_devices
generator = DrafterTrainer._generator
def checked(trainer, is_training):
    assert trainer.is_fsdp_enabled
    assert trainer.accelerator.num_processes == 2
    assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    Path(sys.argv[1], f"sharded-{trainer.args.process_index}").touch()
    return generator(trainer, is_training)
DrafterTrainer._generator = checked
with still_phases():
    sys.exit(cli.main(sys.argv[2:]))
"""


class Run:
    """A command that trains in two sharded processes, and what the same takes in one."""

    def __init__(self, folder: Path, state_dict_type: str = "FULL_STATE_DICT") -> None:
        target = save_target(folder / "target", **SMALL)
        data, held_out = (write_rows(folder / f"{seed}.jsonl", make_rows(16, seed=seed)) for seed in (0, 1))
        layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        (folder / "fsdp.json").write_text(json.dumps({**layers, "state_dict_type": state_dict_type}))
        files = f"--target {target} --data {data} --eval_data {held_out} --max_length 64 --use_cpu --report_to none"
        self.folder = folder
        self.command = f"train {files} --max_steps 4 --feature_noise 0 --drafter_config recurrent_dropout=0.0".split()

    def sharded(self, output: str, *options: str) -> dict[str, Tensor]:
        """The weights that two processes come to, each with four rows of a step."""
        sharding = ["--fsdp", "--fsdp_config", str(self.folder / "fsdp.json"), "--per_device_train_batch_size", "4"]
        output_options = ["--output_dir", str(self.folder / output)]
        run_two(THROUGH_ACCELERATE, self.folder, *self.command, *sharding, *output_options, *options)
        return load_file(self.folder / output / "model.safetensors")


@pytest.mark.slow  # two processes that start from nothing
def test_the_command_trains_a_sharded_drafter_through_accelerate(tmp_path: Path) -> None:
    run, options = Run(tmp_path), ["--optim", "sgd", "--learning_rate", "0.1", "--save_strategy", "no"]

    sharded = run.sharded("sharded", *options)

    assert {path.name for path in tmp_path.glob("sharded-*")} == {"sharded-0", "sharded-1"}
    whole = [*run.command, *options, "--per_device_train_batch_size", "8", "--output_dir", str(tmp_path / "whole")]
    with still_phases():
        assert cli.main(whole) == 0
    FalconSpecDrafter.from_pretrained(tmp_path / "sharded")
    torch.testing.assert_close(sharded, load_file(tmp_path / "whole" / "model.safetensors"), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # two processes that start from nothing, twice
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_run_goes_on_from_its_checkpoint(tmp_path: Path, state_dict_type: str) -> None:
    run, output = Run(tmp_path, state_dict_type), tmp_path / "drafter"
    expected = run.sharded("drafter", "--save_steps", "2")
    for path in (output / "model.safetensors", output / "training.json"):
        path.unlink()
    shutil.rmtree(output / "checkpoint-4")  # as if it had been killed after the third step

    found = run.sharded("drafter", "--save_steps", "2", "--resume_from_checkpoint", "true")

    torch.testing.assert_close(found, expected, rtol=0, atol=0)
