"""Targets spread over devices by `device_map` give the same losses and texts, in one process only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chat import make_rows, save_target, write_rows
from tests.tiny import make_eagle, make_target
from tests.training.runs import SMALL, loss_curve, make_trainer
from transformers_falcon_spec import cli
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.model_parts import is_spread
from transformers_falcon_spec.provenance import weights_fingerprint
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training

DEVICES = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
DEVICES |= {"model.rotary_emb": "cpu", "lm_head": "disk"}


def spread_target(folder: Path) -> Any:
    """The tiny target with a layer and its head on disk."""
    make_target(**SMALL).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, device_map=DEVICES)


def trained(folder: Path, target: Any, drafter_options: Any = None, **options: Any) -> DrafterTrainer:
    trainer = make_trainer(folder, drafter_options, make_target_of_run=lambda: target, **options)
    trainer.train()
    return trainer


def test_losses_and_texts_are_those_of_a_target_on_one_device(tmp_path: Path) -> None:
    options = {"logging_steps": 1, "eval_decode_prompts": 2, "eval_decode_tokens": 8}
    targets = make_target(**SMALL), spread_target(tmp_path / "target")

    whole, spread = (trained(tmp_path, target, **options) for target in targets)

    assert weights_fingerprint(spread.features.target) == weights_fingerprint(whole.features.target)
    assert is_spread(spread.features.target)
    assert not is_spread(whole.features.target)
    torch.testing.assert_close(loss_curve(spread), loss_curve(whole), rtol=1e-5, atol=1e-6)
    assert loss_curve(spread)[-1] < loss_curve(spread)[0]
    found, expected = (trainer.evaluate()["eval_acceptance_length"] for trainer in (spread, whole))
    assert found == expected


def test_several_layers_are_read_on_all_devices(tmp_path: Path) -> None:
    options = {"make": make_eagle, "ttt_steps": 2}
    targets = make_target(**SMALL), spread_target(tmp_path / "target")

    whole, spread = (
        trained(tmp_path, target, {"version": 3, "feature_layers": [0, 1, -1]}, **options) for target in targets
    )

    torch.testing.assert_close(loss_curve(spread), loss_curve(whole), rtol=1e-5, atol=1e-6)


def test_the_command_takes_a_device_map(tmp_path: Path) -> None:
    save_target(tmp_path / "target", **SMALL)
    data = write_rows(tmp_path / "data.jsonl", make_rows(8))
    line = [
        "train",
        "--target",
        str(tmp_path / "target"),
        "--data",
        str(data),
        "--output_dir",
        str(tmp_path / "drafter"),
    ]
    line += ["--max_steps", "2", "--use_cpu", "--report_to", "none", "--cache_features", str(tmp_path / "features")]

    assert cli.main([*line, "--target_device_map", "auto"]) == 0
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_several_processes_cannot_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterTrainingArguments, "world_size", 2)

    with pytest.raises(OptionError, match=r"spread over devices serves one process, but there are 2\. Start one"):
        make_trainer(tmp_path, make_target_of_run=lambda: spread_target(tmp_path / "target"))


def test_a_process_trains_on_one_device_however_many_it_sees(tmp_path: Path) -> None:
    args = DrafterTrainingArguments(str(tmp_path), per_device_train_batch_size=3, use_cpu=True)
    args._n_gpu = 4  # as Transformers finds them

    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (1, 3, 8)
