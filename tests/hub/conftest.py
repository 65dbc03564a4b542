"""A Hub on localhost for each test, of which this process is a client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

from tests.hub.repositories import Hub
from tests.hub.server import running

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "a" * 34


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `HF_ENDPOINT` does, after huggingface_hub was imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", url)  # that of the functions of huggingface_hub
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # newer Transformers keep one


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(tmp_path / "hub") as hub:
        point_to(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # pauses before the client asks again
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
