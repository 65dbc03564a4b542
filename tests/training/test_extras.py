"""What only training needs is asked for in words where it is missing."""

import sys
from pathlib import Path

import pytest

from tests.chat import make_rows, make_tokenizer
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.features import FeatureCache, TargetFeatures
from transformers_falcon_spec.training.lora import LoraOptions, with_lora

pytestmark = pytest.mark.training


@pytest.mark.parametrize("package", ["accelerate", "datasets", "peft"])
def test_a_missing_package_is_named_with_what_to_do(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(**SMALL)
    data = ConversationDataset(make_rows(2), make_tokenizer(), 64)
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path / "drafter")
    drafter = type(drafter).from_pretrained(tmp_path / "drafter")
    uses = {
        "accelerate": lambda: FeatureCache(data, TargetFeatures(target, (-1,), 2), tmp_path / "features"),
        "datasets": lambda: ConversationDataset(make_rows(2), make_tokenizer(), 64),
        "peft": lambda: with_lora(drafter, LoraOptions(use_peft=True)),
    }
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(OptionError, match=f"Training needs the package `{package}`, .* Run `pip install {package}`"):
        uses[package]()
