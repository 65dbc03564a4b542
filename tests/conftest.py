"""What every test shares. It must not import the package: the shape checks hook into the first import, which comes later."""

import os
import sys

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by huggingface_hub when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    """Every test starts from the same global random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _untuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count steps and nodes, which a tuner would choose by the clock: only tests marked `tuned` have one."""
    if (
        request.node.get_closest_marker("tuned") is None
        and "transformers_falcon_spec.generation.tuning" in sys.modules
    ):
        monkeypatch.setattr("transformers_falcon_spec.generation.tuning.knowledge_of", lambda *_: ())
