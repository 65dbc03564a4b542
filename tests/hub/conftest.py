"""A Hub on localhost for each test, and this process made a client of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.hub.repositories import Hub
from tests.hub.server import running

TOKEN = "hf_" + "a" * 34


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(tmp_path / "hub") as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        values = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        values |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(tmp_path / "cache")}
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # pauses before the client asks again
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
