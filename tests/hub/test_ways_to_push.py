"""However a drafter is pushed, what arrives is the same: weights and one card."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import HfApi, ModelCard

from tests.hub.repositories import Hub
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL, make_trainer
from transformers_falcon_spec import FalconSpecDrafter, PublishError
from transformers_falcon_spec.cli import main
from transformers_falcon_spec.hub.card import Publication
from transformers_falcon_spec.hub.publish import staged
from transformers_falcon_spec.training.lora import with_lora
from transformers_falcon_spec.training.options import LoraOptions

REPO, TARGET, TUNED = "someone/falcon-tiny", "someone/target", "someone/target-tuned"
pytestmark = [pytest.mark.commands]


def trainer_of(folder: Path, **options: Any) -> Any:
    """A trainer of a drafter whose target has a name on the Hub."""
    return make_trainer(
        folder,
        {"target_name_or_path": TARGET},
        **{"max_steps": 1, "hub_model_id": REPO, "logging_steps": 1, **options},
    )


def names() -> set[str]:
    """Files on the Hub."""
    return set(HfApi().list_repo_files(REPO))


def test_every_way_to_push_ends_in_the_same_card_and_files(hub: Hub, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    cards, files = [], []

    def publish_folder() -> None:
        assert main(["publish", str(tmp_path / "run"), REPO, "--target", TARGET]) == 0

    for push in (
        trainer.push_to_hub,
        publish_folder,
        lambda: FalconSpecDrafter.from_pretrained(tmp_path / "run").push_to_hub(REPO),
        lambda: FalconSpecDrafter.from_pretrained(tmp_path / "run").save_pretrained(
            tmp_path / "run", push_to_hub=True, repo_id=REPO
        ),
    ):
        push()
        cards.append(re.sub(r"\d+ seconds", "", str(ModelCard.load(REPO, ignore_metadata_errors=True))))
        files.append(names())

    assert len(set(cards)) == 1
    assert "1 steps" in cards[0]
    assert files == [{"README.md", "config.json", "generation_config.json", "model.safetensors", "training.json"}] * 4
    weight = FalconSpecDrafter.from_pretrained(REPO).state_dict()["layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, trainer.drafter.state_dict()["layers.0.mlp.up_proj.weight"])


def test_a_drafter_of_the_hub_that_is_pushed_again_keeps_its_records(hub: Hub, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    trainer.push_to_hub()
    drafter = FalconSpecDrafter.from_pretrained(REPO)
    drafter.generation_config.num_tree_nodes = 4

    drafter.push_to_hub(REPO)

    assert "training.json" in names()
    assert "1 steps" in str(ModelCard.load(REPO, ignore_metadata_errors=True))
    assert FalconSpecDrafter.from_pretrained(REPO).generation_config.num_tree_nodes == 4


def test_a_drafter_whose_folder_is_gone_is_pushed_without_records(hub: Hub, tmp_path: Path) -> None:
    make_drafter(make_target(**SMALL), target_name_or_path=TARGET).save_pretrained(tmp_path / "drafter")
    drafter = FalconSpecDrafter.from_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter").rename(tmp_path / "elsewhere")

    drafter.push_to_hub(REPO)

    assert "training.json" not in names()


def test_records_that_the_hub_does_not_give_now_are_not_left_out(hub: Hub, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    trainer.push_to_hub()
    drafter = FalconSpecDrafter.from_pretrained(REPO)
    hub.failing = {"training.json"}

    with pytest.raises(PublishError, match=rf"`training.json` of `{REPO}` must be read from the Hub"):
        drafter.push_to_hub(REPO)

    hub.failing = set()
    assert "training.json" in names()


def test_a_run_that_pushes_publishes_the_drafter_at_its_end(hub: Hub, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = trainer_of(tmp_path / "run", push_to_hub=True, **saving)

    trainer.train()
    num_commits = sum("/commit/" in line for line in hub.requests)
    trainer.save_model()

    assert num_commits == 0
    assert sum("/commit/" in line for line in hub.requests) == 1
    assert names() == {"README.md", "config.json", "generation_config.json", "model.safetensors", "training.json"}


def test_what_cannot_be_published_is_refused_before_training(hub: Hub, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, {"target_name_or_path": "not a name"}, push_to_hub=True, hub_model_id=REPO)

    with pytest.raises(PublishError, match="The card must name the target as the Hub does"):
        trainer.train()

    assert trainer.state.global_step == 0


def test_an_adapter_is_published_merged_into_its_drafter(hub: Hub, tmp_path: Path) -> None:
    make_drafter(make_target(**SMALL), target_name_or_path=TARGET).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    base = FalconSpecDrafter.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()

    status = main(["publish", str(tmp_path / "adapter"), REPO, "--target", TARGET])

    found = FalconSpecDrafter.from_pretrained(REPO).state_dict()
    assert status == 0
    assert found.keys() == expected.keys()
    assert all(torch.allclose(weight, expected[name]) for name, weight in found.items())


def trained_adapter(folder: Path) -> Path:
    """An adapter that was trained for another target than the drafter beneath it."""
    make_drafter(make_target(**SMALL), target_name_or_path=TARGET).save_pretrained(folder / "base")

    def with_adapter(_: Any) -> Any:
        return with_lora(FalconSpecDrafter.from_pretrained(folder / "base"), LoraOptions(use_peft=True, lora_r=2))

    def tuned_target() -> Any:
        target = make_target(**SMALL)
        target.config._name_or_path = TUNED
        return target

    trainer = make_trainer(folder / "adapter", make=with_adapter, make_target_of_run=tuned_target, max_steps=1)
    trainer.train()
    trainer.save_model()
    return folder / "adapter"


def test_a_published_adapter_names_the_target_that_it_was_trained_for(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)

    with staged(adapter, REPO, Publication()) as files:
        config = json.loads((files / "config.json").read_text(encoding="utf-8"))
        card = (files / "README.md").read_text(encoding="utf-8")

    assert config["target_name_or_path"] == TUNED
    assert ModelCard(card).data["base_model"] == TUNED
    assert TARGET not in card.replace(TUNED, "")


@pytest.mark.parametrize("is_recorded", [True, False])
def test_an_adapter_that_no_record_names_a_target_for_is_published_only_with_a_name(
    tmp_path: Path, is_recorded: bool
) -> None:
    record = trained_adapter(tmp_path) / "training.json"
    facts = json.loads(record.read_text(encoding="utf-8"))
    del facts["target"]
    record.write_text(json.dumps(facts), encoding="utf-8")
    if not is_recorded:
        record.unlink()

    with (
        pytest.raises(PublishError, match="Name it: `--target OWNER/NAME`"),
        staged(record.parent, REPO, Publication()),
    ):
        pass


def test_nothing_is_sent_where_only_the_files_are_wanted(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_drafter(make_target(**SMALL)).save_pretrained(tmp_path / "drafter")
    options = ["publish", str(tmp_path / "drafter"), REPO, "--target", TARGET]

    assert main([*options, "--dry_run"]) == 0
    listed = capsys.readouterr().out
    (tmp_path / "staged").mkdir()
    assert main([*options, "--output", str(tmp_path / "staged")]) == 0
    taken = main([*options, "--output", str(tmp_path / "staged")])

    assert re.search(r"\d+\.\d{3} MB  model\.safetensors", listed)
    assert "Nothing was sent. This would be someone/falcon-tiny." in listed
    assert FalconSpecDrafter.from_pretrained(tmp_path / "staged").config.target_name_or_path == TARGET
    assert (tmp_path / "staged" / "README.md").is_file()
    assert taken == 1
    assert "OptionError: `--output` must be a new or an empty folder" in capsys.readouterr().err
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]


def test_the_files_that_are_wanted_lie_where_others_may_read_them(tmp_path: Path) -> None:
    make_drafter(make_target(**SMALL)).save_pretrained(tmp_path / "drafter")

    main(["publish", str(tmp_path / "drafter"), REPO, "--target", TARGET, "--output", str(tmp_path / "staged")])

    assert stat.S_IMODE((tmp_path / "staged").stat().st_mode) == 0o755
