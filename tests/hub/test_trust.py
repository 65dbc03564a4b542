"""Code from the Hub: it runs only on request, comes complete or not at all, and works without network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from transformers import AutoModel

from tests.hub.conftest import TOKEN, point_to
from tests.hub.repositories import Hub
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import CheckpointError, FalconSpecDrafter

REPO = "someone/falcon-tiny"
INPUTS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def target() -> Any:
    return make_target()


@pytest.fixture
def published(hub: Hub, target: Any) -> Hub:
    make_drafter(target).push_to_hub(REPO, target="someone/target", private=True, with_code=True)
    return hub


@pytest.mark.usefixtures("published", "code_folder")
def test_code_of_a_repository_runs_where_it_is_trusted_alone(target: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nraise ZeroDivisionError".encode()
    names = [name for name in HfApi().list_repo_files(REPO) if name.endswith(".py")]
    replaced = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=code) for name in names]
    HfApi().create_commit(REPO, replaced, commit_message="Other code")

    drafters = [loader.from_pretrained(REPO) for loader in (FalconSpecDrafter, AutoModel)]
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        target.generate(INPUTS, **OPTIONS, custom_generate=REPO, trust_remote_code=False)

    assert {type(drafter) for drafter in drafters} == {FalconSpecDrafter}
    assert not ran.exists()
    with pytest.raises(ZeroDivisionError):
        target.generate(INPUTS, **OPTIONS, custom_generate=REPO, trust_remote_code=True)
    assert ran.exists()


@pytest.mark.usefixtures("code_folder")
@pytest.mark.parametrize(
    "missing", ["custom_generate/generate.py", "custom_generate/core_tree.py", "model.safetensors"]
)
def test_published_code_with_a_file_missing_is_refused_by_name(missing: str, published: Hub, target: Any) -> None:
    HfApi().delete_file(missing, REPO)

    message = Path(missing).name.replace("generate.py", "does not contain a `custom_generate` subdirectory")
    with pytest.raises((OSError, ValueError), match=message) as caught:
        target.generate(INPUTS, **OPTIONS, custom_generate=REPO, trust_remote_code=True)

    assert REPO in str(caught.value)


def test_a_drafter_without_its_config_is_refused_by_name(published: Hub) -> None:
    HfApi().delete_file("config.json", REPO)

    with pytest.raises(CheckpointError, match=rf"`{REPO}` must have a `config.json`"):
        FalconSpecDrafter.from_pretrained(REPO)


@pytest.mark.usefixtures("published", "code_folder")
def test_without_network_the_code_in_the_cache_serves(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = {"custom_generate": REPO, "trust_remote_code": True}
    before = target.generate(INPUTS, **OPTIONS, **custom)
    point_to("http://127.0.0.1:9", monkeypatch)

    later = make_target()  # for which nothing is kept in memory
    after = later.generate(INPUTS, **OPTIONS, **custom)

    assert after.equal(before)
    assert after.equal(later.generate(INPUTS, **OPTIONS))
    with pytest.raises(OSError, match="couldn't connect"):
        FalconSpecDrafter.from_pretrained("someone/unknown")


@pytest.mark.usefixtures("code_folder")
def test_private_code_takes_the_token_that_it_is_given(
    published: Hub, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    custom = {"custom_generate": REPO, "trust_remote_code": True}

    with pytest.raises(OSError, match=REPO):
        target.generate(INPUTS, **OPTIONS, **custom)

    assert target.generate(INPUTS, **OPTIONS, **custom, token=TOKEN).equal(target.generate(INPUTS, **OPTIONS))
