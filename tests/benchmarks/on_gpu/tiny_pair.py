"""A folder of models as the benchmark on a GPU wants it, of tiny ones."""

from pathlib import Path

import pytest

from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec.commands.loading import load_target


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a tiny pair under the names of the embedded one."""
    target = save_target(tmp_path / "models" / "reference-target")
    drafter = make_drafter(load_target(str(target), "float32", "cpu")[0], block_size=2)
    drafter.save_pretrained(tmp_path / "models" / "falcon-reference")
    return tmp_path / "models"
