"""Folders of drafters, trainers and checkpoints hold no code, and load where this package is imported."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModel

from lab.renew_drafters import main
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL, make_trainer
from transformers_falcon_spec import FalconSpecDrafter, load_drafter

SHARED = [folder / "shared/models/trained" for folder in Path(__file__).parents]
TRAINED = next((folder for folder in SHARED if folder.is_dir()), None)
INPUTS = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), "max_new_tokens": 8, "pad_token_id": 0}


def total_of(drafter: Any) -> float:
    """What tells the weights of drafters apart."""
    return sum(weight.double().abs().sum().item() for weight in drafter.parameters())


def test_folders_of_drafters_trainers_checkpoints_and_adapters_hold_no_code_and_load(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    trainer = make_trainer(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    adapted = peft.get_peft_model(
        FalconSpecDrafter.from_pretrained(tmp_path / "drafter"),
        peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    plain = target.generate(**INPUTS)

    totals = {}
    for name in ("drafter", "trained", "run/checkpoint-1", "adapter"):
        drafter = load_drafter(tmp_path / name, target)
        out = target.generate(**INPUTS, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.equal(plain)
        assert out.speculation.num_drafted > 0
        totals[name] = total_of(drafter)

    assert [path for path in tmp_path.rglob("*") if path.suffix == ".py"] == []
    assert type(AutoModel.from_pretrained(tmp_path / "run/checkpoint-1")) is FalconSpecDrafter
    assert totals["trained"] == totals["run/checkpoint-1"] != totals["drafter"]
    assert totals["adapter"] > totals["drafter"]


@pytest.mark.skipif(TRAINED is None, reason="the drafters trained elsewhere are not here")
@pytest.mark.parametrize("name", ["dflash", "eagle1", "eagle3", "falcon3", "falcon5"])
def test_the_drafters_that_were_trained_elsewhere_load_once_rewritten(name: str, tmp_path: Path) -> None:
    assert TRAINED is not None
    shutil.copytree(TRAINED / name, tmp_path / "before" / name)
    main(str(tmp_path / "before"), str(tmp_path / "now"))

    drafter = AutoModel.from_pretrained(tmp_path / "now" / name)

    assert total_of(drafter) > 0
