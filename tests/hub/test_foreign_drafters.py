"""Drafters of other software on the Hub: fetched and converted once for each commit, and pinned."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from tests.convert import foreign, foreign_diffusion
from tests.hub.repositories import Hub
from tests.tiny import make_target
from transformers_falcon_spec import CheckpointError, load_drafter

REPO = "someone/eagle3-tiny"


def upload(folder: Path, seed: int) -> str:
    """Put an Eagle-3 drafter on the Hub; returns the commit."""
    config, weights = foreign.eagle3(eagle_aux_hidden_state_layer_ids=foreign.LAYER_IDS)
    weights["fc.weight"] += seed
    HfApi().create_repo(REPO, exist_ok=True)
    source = foreign.written(folder, config, weights, "model.safetensors")
    return str(HfApi().upload_folder(repo_id=REPO, folder_path=source).oid)


def weights_sent(hub: Hub) -> int:
    """How often weights were asked for."""
    return sum(line.startswith("GET /cdn/") for line in hub.requests)


def test_a_drafter_of_other_software_is_fetched_and_converted_once_for_each_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    target: Any = make_target("llama")
    old = upload(tmp_path / "source", seed=0)

    first, again = load_drafter(REPO, target), load_drafter(REPO, target)
    num_sent = weights_sent(hub)
    upload(tmp_path / "source", seed=1)
    newer, pinned = load_drafter(REPO, target), load_drafter(REPO, target, revision=old)

    assert num_sent == 1
    assert again.fc.weight.equal(first.fc.weight)
    assert not newer.fc.weight.equal(first.fc.weight)
    assert pinned.fc.weight.equal(first.fc.weight)


def test_of_a_diffusion_model_the_tokenizer_is_fetched_and_no_code(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    target = foreign_diffusion.saved_target(tmp_path / "target")
    source = foreign_diffusion.saved(tmp_path / "source", foreign_diffusion.dream())
    HfApi().create_repo("someone/dream-tiny")
    HfApi().upload_folder(repo_id="someone/dream-tiny", folder_path=source)

    drafter: Any = load_drafter("someone/dream-tiny", target)

    assert drafter.config.mask_token_id == foreign_diffusion.MASK
    fetched = [line for line in hub.requests if line.startswith("GET") and "dream-tiny" in line]
    assert any("tokenizer.json" in line for line in fetched)
    assert not any(".py" in line for line in fetched)


def test_of_a_sentencepiece_model_alone_the_hub_says_what_a_folder_says(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    target = foreign_diffusion.saved_target(tmp_path / "target", "llama")
    source = foreign_diffusion.saved(tmp_path / "source", foreign_diffusion.diffullama())
    (source / "tokenizer.json").rename(source / "tokenizer.model")
    HfApi().create_repo("someone/diffullama-tiny")
    HfApi().upload_folder(repo_id="someone/diffullama-tiny", folder_path=source)

    with pytest.raises(CheckpointError, match=r"holds them as `tokenizer.model` alone\. Write them"):
        load_drafter("someone/diffullama-tiny", target)
