"""Cards of converted drafters: they name the source with its files, and claim neither a training nor that there was none."""

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
from huggingface_hub import HfApi, ModelCard

from tests.convert import foreign, foreign_diffusion
from tests.convert.refusals import MAKERS
from tests.convert.test_dflash_format import saved as saved_dflash
from tests.hub.conftest import ROOT
from tests.hub.repositories import Hub
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import EagleDrafter, LookaheadDrafter, PublishError
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.hub.card import Publication, render_card
from transformers_falcon_spec.hub.publish import staged

REPO, TARGET = "someone/converted", "someone/target"
NOTHING = ("Nothing was trained", "learned from no data")
STOCK = "dflash of Transformers"
DIFFUSION = {"dream": foreign_diffusion.dream(), "a2d": foreign_diffusion.a2d("qwen2")}


def converted(kind: str, folder: Path) -> Path:
    """The folder of a drafter converted from that of another beside it, `source`."""
    target = None
    if kind in DIFFUSION:
        foreign_diffusion.saved(folder / "source", DIFFUSION[kind])
        foreign_diffusion.saved_target(folder / "target")
        target = str(folder / "target")
    elif kind == STOCK:
        saved_dflash(folder / "source")
        make_target(num_hidden_layers=4).save_pretrained(folder / "target")
        target = str(folder / "target")
    else:
        foreign.written(folder / "source", *MAKERS[kind]())
    convert_checkpoint(folder / "source", folder / "converted", target)
    return folder / "converted"


def card_of(folder: Path) -> str:
    """What would be published as the card."""
    with staged(folder, REPO, Publication(target=TARGET)) as files:
        return (files / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*MAKERS, *DIFFUSION, STOCK])
def test_the_card_names_the_source_its_format_and_the_digest_of_each_file(kind: str, tmp_path: Path) -> None:
    folder = converted(kind, tmp_path)

    card = card_of(folder)

    record = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))
    made = card.partition("## How it was made")[2]
    assert (
        f"converted from `{record['source']}`, a checkpoint of other software in the format {record['format']}" in made
    )
    assert record["source"].endswith("source")
    weights = next(path for path in (tmp_path / "source").iterdir() if path.suffix in (".bin", ".safetensors"))
    assert f"| `{weights.name}` | `{hashlib.sha256(weights.read_bytes()).hexdigest()}` |" in made
    assert made.count("` | `") == len(record["source_sha256"]) >= 2
    assert "What it learned from, and under which licence, is not known here." in made
    assert "How it was trained is not known here" in card
    assert not any(each in card for each in NOTHING)


def test_the_record_goes_with_a_converted_drafter_that_is_pushed_and_leaves_with_it(hub: Hub, tmp_path: Path) -> None:
    drafter: Any = EagleDrafter.from_pretrained(converted("eagle", tmp_path))

    drafter.push_to_hub(REPO, target=TARGET)
    card = str(ModelCard.load(REPO).content)
    files = HfApi().list_repo_files(REPO)
    make_drafter(make_target()).push_to_hub(REPO, target=TARGET)

    assert "converted from `" in card
    assert "conversion.json" in files
    assert "conversion.json" not in HfApi().list_repo_files(REPO)
    assert "converted from `" not in str(ModelCard.load(REPO).content)


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_an_adapter_of_a_converted_drafter_was_converted_and_then_trained(
    hub: Hub, tmp_path: Path, is_on_hub: bool
) -> None:
    base = str(converted("eagle", tmp_path))
    if is_on_hub:
        HfApi().create_repo(REPO)
        HfApi().upload_folder(repo_id=REPO, folder_path=base)
        base = REPO
    adapted = peft.get_peft_model(
        EagleDrafter.from_pretrained(base), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    adapted.save_pretrained(tmp_path / "adapter")
    training = (ROOT / "models/falcon-reference/training.json").read_text(encoding="utf-8")
    (tmp_path / "adapter" / "training.json").write_text(training, encoding="utf-8")

    card = card_of(tmp_path / "adapter")

    assert "converted from `" in card
    assert "On held-out text" in card.partition("converted from `")[2]
    assert "How it was trained is not known here" not in card


def test_drafters_that_were_not_converted_say_what_they_said() -> None:
    target = make_target()

    lookahead, falcon = (
        render_card(drafter, "a/b", "a/target")
        for drafter in (LookaheadDrafter.from_target(target), make_drafter(target))
    )

    assert all(each in lookahead for each in NOTHING)
    assert "Nothing was trained, or no `training.json`" in falcon
    assert "What it learned from, and under which licence, is not known here." in falcon
    assert "converted" not in lookahead + falcon


def test_a_record_of_other_software_is_refused() -> None:
    drafter = LookaheadDrafter.from_target(make_target())

    with pytest.raises(
        PublishError, match=r"`conversion.json` .* must be those of .* `falcon-spec convert`, but .* 'source'"
    ):
        render_card(drafter, "a/b", "a/target", records={"conversion.json": {"date": "today"}})
