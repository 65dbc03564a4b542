"""Every folder that a drafter is saved to loads where this package is not; an adapter's does with that of its drafter."""

from pathlib import Path
from typing import Any

import peft

from tests.hub.clients import run_client
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL, make_trainer
from transformers_falcon_spec import FalconSpecDrafter

CLIENT = """
import json
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{folder}/target").eval()
inputs = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), attention_mask=torch.ones(1, 8, dtype=torch.long))
options = dict(max_new_tokens=8, pad_token_id=0, return_dict_in_generate=True)
plain = target.generate(**inputs, **options).sequences.tolist()
found = {{}}
for name in {names}:
    drafter = AutoModel.from_pretrained(f"{folder}/{{name}}", trust_remote_code=True).eval()
    custom = dict(custom_generate="{folder}/drafter", trust_remote_code=True)
    out = target.generate(**inputs, **options, **custom, assistant_model=drafter)
    total = sum(weight.double().abs().sum().item() for weight in drafter.parameters())
    found[name] = [type(drafter).__name__, out.sequences.tolist() == plain, out.speculation.num_drafted, total]
print(json.dumps(found))
"""


def test_folders_of_drafters_trainers_checkpoints_and_adapters_load_without_the_package(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    target.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    trainer = make_trainer(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    adapted = peft.get_peft_model(
        FalconSpecDrafter.from_pretrained(tmp_path / "drafter"),
        peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    names = ["drafter", "trained", "run/checkpoint-1", "adapter"]

    found = run_client(CLIENT.format(folder=tmp_path, names=names), tmp_path / "home")

    assert {tuple(each[:2]) for each in found.values()} == {("FalconSpecDrafter", True)}
    assert all(each[2] > 0 for each in found.values())
    assert found["trained"][3] == found["run/checkpoint-1"][3] != found["drafter"][3]
    assert found["adapter"][3] > found["drafter"][3]


def test_a_class_that_no_module_holds_is_saved_without_code(tmp_path: Path, caplog: Any) -> None:
    class Own(FalconSpecDrafter):
        """Not registered."""

    target = make_target(**SMALL)
    with caplog.at_level("INFO"):
        Own(make_drafter(target).config).save_pretrained(tmp_path)

    assert "No code is saved with a `Own`" in caplog.text
    assert not (tmp_path / "custom_generate").exists()


def test_a_folder_that_is_saved_again_has_the_code_of_now(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(**SMALL))
    drafter.save_pretrained(tmp_path)
    (tmp_path / "custom_generate" / "generate.py").write_text("old")

    FalconSpecDrafter.from_pretrained(tmp_path).save_pretrained(tmp_path)

    assert "CustomGenerate" in (tmp_path / "custom_generate" / "generate.py").read_text()


WITHOUT_ITS_RECIPE = """
import json
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{folder}/target").eval()
drafter = AutoModel.from_pretrained("{folder}/drafter", trust_remote_code=True).eval()
try:
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=2)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_published_drafter_without_its_recipe_says_how_to_call_it(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    target.save_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "drafter")

    kind, message = run_client(WITHOUT_ITS_RECIPE.format(folder=tmp_path), tmp_path / "home")

    assert kind == "PatchError"
    assert (
        "custom_generate=REPO, trust_remote_code=True)` with the repository that it came from, or install" in message
    )
