"""`falcon-spec train --method diffusion`: from a target on disk to a diffusion drafter that drafts for it."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import make_rows, save_target, write_rows
from tests.commands.test_train import train
from tests.tiny import make_prompt
from tests.training.runs import SMALL
from transformers_falcon_spec import DiffusionDrafter


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and conversations to learn from and to evaluate with."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "target": str(save_target(folder / "target", **SMALL)),
        "data": str(write_rows(folder / "data.jsonl", make_rows(12))),
        "eval_data": str(write_rows(folder / "eval.jsonl", make_rows(4, seed=1))),
    }


def test_a_diffusion_drafter_comes_out_that_drafts(files: dict[str, str], tmp_path: Path) -> None:
    fields = ["num_hidden_layers=1", "block_size=4", "search=tree"]
    options = ["--method", "diffusion", "--drafter_config", *fields, "--eval_data", files["eval_data"]]

    status = train(files, tmp_path, *options, "--num_anchors", "4")

    target = AutoModelForCausalLM.from_pretrained(files["target"])
    drafter = DiffusionDrafter.from_pretrained(tmp_path, target=target).eval()
    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert status == 0
    assert (drafter.config.attention, drafter.config.block_size, drafter.config.search) == ("prefix_causal", 4, "tree")
    assert drafter.model.config.num_hidden_layers == 1
    assert any("eval_accuracy_at_4" in entry for entry in record["curve"])
    prompt = make_prompt()
    out = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    assert out.sequences.equal(target.generate(prompt, max_new_tokens=8, do_sample=False))
    assert out.speculation.num_drafted > 0
