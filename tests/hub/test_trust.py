"""Code in a repository never runs, and drafters load from the cache and with a token as other models do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModel

from tests.hub.conftest import TOKEN, point_to
from tests.hub.repositories import Hub
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import CheckpointError, FalconSpecDrafter, load_drafter

REPO = "someone/falcon-tiny"


@pytest.fixture
def published(hub: Hub) -> Hub:
    make_drafter(make_target()).push_to_hub(REPO, target="someone/target", private=True)
    return hub


def upload(name: str, content: str) -> None:
    HfApi().upload_file(path_or_fileobj=content.encode(), path_in_repo=name, repo_id=REPO)


@pytest.mark.usefixtures("published")
def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    config = json.loads(Path(HfApi().hf_hub_download(REPO, "config.json")).read_text("utf-8"))
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    upload("code.py", f"open({str(ran)!r}, 'w').close()")
    upload("config.json", json.dumps(config))

    loaders: Any = (FalconSpecDrafter.from_pretrained, AutoModel.from_pretrained)
    drafters = [load(REPO) for load in loaders] + [load_drafter(REPO, make_target())]

    assert {type(drafter) for drafter in drafters} == {FalconSpecDrafter}
    assert not ran.exists()


@pytest.mark.usefixtures("published")
def test_a_drafter_without_its_config_is_refused_by_name() -> None:
    HfApi().delete_file("config.json", REPO)

    with pytest.raises(CheckpointError, match=rf"`{REPO}` must have a `config.json`"):
        FalconSpecDrafter.from_pretrained(REPO)


@pytest.mark.usefixtures("published")
def test_without_network_the_drafter_in_the_cache_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_drafter(REPO, make_target())
    point_to("http://127.0.0.1:9", monkeypatch)

    after = load_drafter(REPO, make_target())

    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name])
    with pytest.raises(OSError, match="couldn't connect"):
        FalconSpecDrafter.from_pretrained("someone/unknown")


@pytest.mark.usefixtures("published")
def test_a_private_drafter_takes_the_token_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(OSError, match=REPO):
        FalconSpecDrafter.from_pretrained(REPO)

    assert FalconSpecDrafter.from_pretrained(REPO, token=TOKEN).config.target_name_or_path == "someone/target"
