"""Publishing to a Hub on localhost and loading from it: complete, pinned, private, interrupted, broken."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.utils import logging as hub_logging

from tests.hub.conftest import ROOT, TOKEN, point_to
from tests.hub.repositories import Hub
from tests.tiny import make_target
from transformers_falcon_spec import CheckpointError, DiffusionDrafter, FalconSpecDrafter, OptionError, PublishError
from transformers_falcon_spec.cli import main
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy
from transformers_falcon_spec.hub.card import Publication
from transformers_falcon_spec.hub.publish import publish

REPO = "someone/falcon-tiny-0.1"
TARGET = "someone/target"
TREE = {"parents": [-1, 0, 0, 1], "ranks": [-1, 0, 1, 0]}


def make_drafter(**options: Any) -> FalconSpecDrafter:
    return FalconSpecDrafter.from_target(make_target(), block_size=2, draft_tree=TREE, **options)


def write_training(folder: Path, command: str) -> None:
    """A `training.json` like that of the embedded drafter."""
    record = json.loads((ROOT / "models/falcon-reference/training.json").read_text(encoding="utf-8"))
    (folder / "training.json").write_text(json.dumps({**record, "command": command}), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drafter = make_drafter()
    drafter.generation_config.tune = False
    drafter.save_pretrained(tmp_path / "drafter")
    write_training(tmp_path / "drafter", "falcon-spec train")
    return tmp_path / "drafter"


def test_a_diffusion_drafter_keeps_its_proxy(hub: Hub, tmp_path: Path) -> None:
    drafter = DiffusionDrafter.from_target(make_target(), num_hidden_layers=1)
    drafter.proxy = NgramProxy.fit([[1, 2, 3]], 2, drafter.config.vocab_size)
    drafter.save_pretrained(tmp_path / "drafter")
    publish(tmp_path / "drafter", REPO, Publication(target=TARGET))

    loaded = DiffusionDrafter.from_pretrained(REPO)

    assert loaded.proxy is not None
    assert loaded.proxy.fingerprint == drafter.proxy.fingerprint


def test_what_is_published_is_what_loads(hub: Hub, folder: Path) -> None:
    commit = publish(folder, REPO, Publication(target=TARGET))

    original, loaded = FalconSpecDrafter.from_pretrained(folder), FalconSpecDrafter.from_pretrained(REPO)
    files = set(HfApi().list_repo_files(REPO))
    assert HfApi().model_info(REPO).sha == commit
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in original.state_dict().items())
    assert loaded.config.draft_tree == TREE
    assert loaded.config.target_name_or_path == TARGET
    assert not loaded.generation_config.tune
    assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors", "training.json"}


def test_a_drafter_is_found_by_its_target(hub: Hub, folder: Path) -> None:
    publish(folder, REPO, Publication(target=TARGET))

    found = [model.id for model in HfApi().list_models(filter=[f"base_model:{TARGET}", "speculative-decoding"])]
    others = list(HfApi().list_models(filter=["base_model:someone/other", "speculative-decoding"]))

    card = ModelCard.load(REPO)
    assert found == [REPO]
    assert card.data.base_model == TARGET
    assert others == []


def test_figures_travel_with_the_drafter_that_they_are_of(hub: Hub) -> None:
    results = ROOT / "benchmarks/results/speed.json"

    publish(ROOT / "models/falcon-reference", REPO, Publication(results=[results], target=TARGET))

    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    card = ModelCard.load(REPO).text
    for row in rows:
        assert f"| {row['speedup']:.2f} (" in card
        assert f"| {row['acceptance_length_pooled']:.2f} (" in card


def test_push_to_hub_publishes_the_drafter_as_it_is_now(hub: Hub, folder: Path) -> None:
    drafter = FalconSpecDrafter.from_pretrained(folder)
    with torch.no_grad():
        drafter.layers[0].mlp.up_proj.weight.fill_(0.5)

    commit = drafter.push_to_hub(REPO, target=TARGET)

    loaded = FalconSpecDrafter.from_pretrained(REPO, revision=commit)
    assert (loaded.layers[0].mlp.up_proj.weight == 0.5).all()
    assert HfApi().file_exists(REPO, "training.json")
    with pytest.raises(OptionError, match="`push_to_hub` has no option `resluts`"):
        drafter.push_to_hub(REPO, resluts=())


def test_a_pinned_revision_stays_what_it_was(hub: Hub, folder: Path) -> None:
    first = publish(folder, REPO, Publication(target=TARGET))
    make_drafter(recurrence="token").save_pretrained(folder)
    second = publish(folder, REPO, Publication(target=TARGET))
    trials = [publish(folder, REPO, Publication(target=name), revision="trial") for name in (TARGET, "someone/other")]

    recurrences = {
        name: FalconSpecDrafter.from_pretrained(REPO, revision=name).config.recurrence for name in (first, second)
    }

    assert recurrences == {first: "sequence", second: "token"}
    tips = {branch.name: branch.target_commit for branch in HfApi().list_repo_refs(REPO).branches}
    assert tips == {"main": second, "trial": trials[-1]}


def test_files_of_an_earlier_publication_do_not_stay(hub: Hub, folder: Path) -> None:
    drafter = FalconSpecDrafter.from_pretrained(folder)
    drafter.push_to_hub(REPO, target=TARGET, max_shard_size=50_000)
    drafter.push_to_hub(REPO, target=TARGET)

    assert [name for name in HfApi().list_repo_files(REPO) if ".safetensors" in name] == ["model.safetensors"]


def test_after_a_cut_only_what_is_missing_is_sent(hub: Hub, folder: Path) -> None:
    drafter = FalconSpecDrafter.from_pretrained(folder)
    hub.num_uploads_before_cut = 2

    with pytest.raises(PublishError, match="what already arrived is not sent twice"):
        drafter.push_to_hub(REPO, target=TARGET, max_shard_size=50_000)
    kept = {path.name for path in (hub.folder / "blobs").iterdir()}
    seen = HfApi().list_repo_files(REPO)
    hub.num_uploads_before_cut = None
    hub.requests.clear()
    drafter.push_to_hub(REPO, target=TARGET, max_shard_size=50_000)

    files = {file.path: file.lfs for file in HfApi().list_repo_tree(REPO, recursive=True)}
    shards = {lfs.sha256 for lfs in files.values() if lfs is not None}
    assert len(shards) > len(kept) == 2
    assert seen == []
    assert sorted(hub.uploads()) == sorted(shards - kept)
    assert torch.equal(
        FalconSpecDrafter.from_pretrained(REPO).recurrence.weight_ih_l0, drafter.recurrence.weight_ih_l0
    )


def test_a_private_repository_is_for_its_owner(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(folder, REPO, Publication(target=TARGET), private=True)
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(OSError, match="is not a local folder and is not a valid model identifier"):
        FalconSpecDrafter.from_pretrained(REPO)

    assert FalconSpecDrafter.from_pretrained(REPO, token=TOKEN).config.draft_tree == TREE


@pytest.mark.parametrize("token", [None, "hf_" + "b" * 34], ids=["none", "of nobody"])
def test_publishing_needs_a_token(hub: Hub, folder: Path, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert get_token() is None

    with pytest.raises(PublishError, match="must take") as caught:
        publish(folder, REPO, Publication(target=TARGET), token=token)

    assert hub.repos() == []
    assert "b" * 34 not in str(caught.value)


def test_weights_cut_on_their_way_are_refused(hub: Hub, folder: Path) -> None:
    publish(folder, REPO, Publication(target=TARGET))
    hub.truncated = {"model.safetensors"}

    with pytest.raises(OSError, match=r"Can't load the model for 'someone/falcon-tiny-0\.1'"):
        FalconSpecDrafter.from_pretrained(REPO)

    hub.truncated = set()
    FalconSpecDrafter.from_pretrained(REPO)


def test_without_network_the_copy_in_the_cache_serves(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(folder, REPO, Publication(target=TARGET))
    FalconSpecDrafter.from_pretrained(REPO)
    point_to("http://127.0.0.1:9", monkeypatch)

    assert FalconSpecDrafter.from_pretrained(REPO).config.draft_tree == TREE
    with pytest.raises(PublishError, match=r"The Hub must take `someone/falcon-tiny-0.1` whole, but .*onnect"):
        publish(folder, REPO, Publication(target=TARGET))


def test_a_repository_without_weights_is_refused_by_name(hub: Hub, folder: Path) -> None:
    publish(folder, REPO, Publication(target=TARGET))
    HfApi().delete_file("model.safetensors", REPO)

    with pytest.raises(OSError, match=r"someone/falcon-tiny-0.1 does not appear to have a file named"):
        FalconSpecDrafter.from_pretrained(REPO)


def test_tokens_stay_out_of_what_is_published_and_out_of_logs(
    hub: Hub, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub_logging.get_logger("huggingface_hub").propagate = True
    other = "hf_" + "c" * 34
    for text in (f"train --hub_token {other}", f"train # {TOKEN}", f"git clone https://me:{'d' * 9}@host/x"):
        write_training(folder, text)

        with (
            caplog.at_level(logging.DEBUG),
            pytest.raises(PublishError, match=r"`(README.md|training.json)` would hold one") as caught,
        ):
            publish(folder, REPO, Publication(target=TARGET))

        assert not any(secret in str(caught.value) + caplog.text for secret in (other, TOKEN, "d" * 9))
    assert hub.repos() == []


def test_pickles_are_refused_and_left_behind(hub: Hub, folder: Path) -> None:
    torch.save({}, folder / "optimizer.pt")

    publish(folder, REPO, Publication(target=TARGET))
    assert "optimizer.pt" not in HfApi().list_repo_files(REPO)

    torch.save(make_drafter().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must be safetensors: others can run code"):
        publish(folder, REPO, Publication(target=TARGET))


def test_folders_without_a_drafter_are_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        publish(tmp_path, REPO, Publication(target=TARGET))
    make_target().save_pretrained(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"The `model_type` of .* must be one of .*, but it is 'llama'"):
        publish(tmp_path / "target", REPO, Publication(target=TARGET))


def test_a_name_without_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", "someone/nothing", REPO, "--target", TARGET, "--dry_run"]) == 1
    assert "CheckpointError: What is published must be the folder of a drafter" in capsys.readouterr().err


def test_what_is_no_name_of_a_repository_is_refused_before_anything_is_sent(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(folder), "some one/falcon", "--target", TARGET, "--dry_run"]) == 1
    assert "PublishError: A drafter is published as `OWNER/NAME`, but " in capsys.readouterr().err


def test_a_record_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "training.json").write_text("{", encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"training\.json` must hold JSON"):
        publish(folder, REPO, Publication(target=TARGET))


def test_a_target_must_be_named_as_the_hub_names_it(hub: Hub, folder: Path, tmp_path: Path) -> None:
    for name in (None, str(tmp_path), "models/reference-target"):
        with pytest.raises(PublishError, match="Name it: `--target OWNER/NAME`"):
            publish(folder, REPO, Publication(target=name))


def test_the_command_prints_how_to_pin_the_commit(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(folder), REPO, "--target", TARGET]) == 0

    commit = HfApi().model_info(REPO).sha
    assert f'load_drafter("{REPO}", target, revision="{commit}")' in capsys.readouterr().out
