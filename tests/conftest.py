"""What every test shares. It must not import the package: the shape checks hook into the first import, which comes later."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by huggingface_hub when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    """Every test starts from the same global random state."""
    torch.manual_seed(0)
