"""The script writes folders that plain `from_pretrained` loads, and says what they are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.inflation import SHAPES, Shape
from benchmarks.inflation import __main__ as script
from tests import runs
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import portable

ROOT = Path(__file__).parents[3]
DRAFTERS = {
    "falcon": FalconSpecDrafter,
    "eagle-1": EagleDrafter,
    "eagle-3": EagleDrafter,
    "medusa": MedusaDrafter,
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_tokenizer(folder: Path) -> None:
    """Give a target the tokenizer of the embedded one."""
    for name in TOKENIZER:
        shutil.copy(ROOT / "models" / "reference-target" / name, folder)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, str]:
    """Folders of a tiny target, of drafters and of a draft model."""
    folders = {name: tmp_path / name for name in ("small", "llama", *DRAFTERS)}
    target = make_target()
    target.save_pretrained(folders["small"])
    drafters = {
        "falcon": make_drafter(target, block_size=2, shortcut=True, newest_row=True),
        "eagle-1": EagleDrafter.from_target(target),
        "eagle-3": EagleDrafter.from_target(target, range(20, 60), version=3, feature_layers=(1, -1)),
        "medusa": MedusaDrafter.from_target(target, num_heads=2),
    }
    for name, drafter in drafters.items():
        assert isinstance(drafter, DRAFTERS[name])
        drafter.save_pretrained(folders[name])
    make_target(seed=1, num_hidden_layers=1).save_pretrained(folders["llama"])
    copy_tokenizer(folders["small"])
    return {name: str(folder) for name, folder in folders.items()}


def test_the_script_writes_stock_folders_and_a_card(pair: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "large"

    script.main(
        [
            *("--target", pair["small"], "--output", str(output)),
            *("--drafters", pair["llama"], *(pair[name] for name in DRAFTERS)),
            *("--hidden_size", "256", "--num_layers", "4", "--vocab_size", "300", "--dtype", "bfloat16"),
        ]
    )

    target = AutoModelForCausalLM.from_pretrained(output / "target")
    assert Shape.of(target.config) == Shape(256, 384, 4, 4, 2, 64, 300)
    assert target.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(output / "target").chat_template
    for name, kind in DRAFTERS.items():
        drafter = load_drafter(str(output / name), target)
        assert isinstance(drafter, kind)
        assert drafter.config.target_name_or_path == portable(output / "target")
        runs.drafted(target, drafter, max_new_tokens=6)
    assert AutoModelForCausalLM.from_pretrained(output / "llama").config.num_hidden_layers == 1
    card = json.loads((output / "inflation.json").read_text("utf-8"))
    assert card["what"] == "function of the small model, cost of the large one"
    assert card["shape"]["hidden_size"] == 256
    assert card["num_parameters"]["target"] == target.num_parameters()
    text = (output / "README.md").read_text("utf-8")
    assert "Function of the small model, cost of the large one" in text
    assert f"`target`: {target.num_parameters():,} parameters" in text


def test_folders_and_names_are_never_written_twice(pair: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must be empty or new"):
        script.main(["--target", pair["small"], "--output", str(tmp_path)])
    drafters = ["--drafters", pair["falcon"], pair["falcon"]]
    with pytest.raises(OptionError, match="names of their own"):
        script.main(["--target", pair["small"], *drafters, "--output", str(tmp_path / "large")])


def test_a_named_shape_takes_no_width_but_another_depth() -> None:
    small = Shape(256, 704, 12, 8, 4, 32, 4096)

    assert script.chosen_shape(small, "0.3b", None, 24, None) == Shape(1024, 2816, 24, 8, 4, 128, 32768)
    assert script.chosen_shape(small, None, 1024, 24, 32768) == Shape(1024, 2816, 24, 8, 4, 128, 32768)
    assert script.chosen_shape(small, None, None, None, None) == small
    assert script.chosen_shape(small, "7b", None, None, None) == SHAPES["7b"]
    with pytest.raises(OptionError, match="`--shape` names a whole shape"):
        script.chosen_shape(small, "0.3b", 1024, None, None)
