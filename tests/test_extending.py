"""`docs/extending.md` as a newcomer follows it: a drafter from outside the package, through public names alone, from training to the Hub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.clients import run_client

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
CLIENT = """
import json
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("models/reference-target").eval()
drafter = AutoModel.from_pretrained("{folder}/published", trust_remote_code=True).eval()
print(json.dumps([type(drafter).__name__, drafter.scores.weight.shape[0]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, in the order in which it shows them."""
    folder = tmp_path_factory.mktemp("extending")
    for found in FILE.finditer((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")):
        (folder / found["name"]).write_text(found["code"], encoding="utf-8")
    (folder / "models").symlink_to(ROOT / "models")
    return folder


def run(folder: Path, script: str) -> str:
    """What a script of the page prints, run on its own as a reader runs it."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_drafter_from_outside_is_trained_saved_loaded_and_published(folder: Path) -> None:
    run(folder, "use.py")  # it asserts that the text is the target's own and that drafts are accepted
    run(folder, "publish.py")

    config = json.loads((folder / "published" / "config.json").read_text(encoding="utf-8"))
    card = (folder / "published" / "README.md").read_text(encoding="utf-8")
    client = run_client(CLIENT.format(folder=folder), folder / "home")

    assert config["auto_map"]["AutoModel"] == "custom_generate/bigrams.BigramDrafter"
    assert "Bigrams" in card
    assert client == ["BigramDrafter", 4096]


def test_a_verifier_from_outside_decides_what_becomes_text(folder: Path) -> None:
    if not (folder / "my-bigrams").exists():
        run(folder, "use.py")

    run(folder, "verify.py")  # it asserts the text of the seed, and that a step keeps one drafted token at most


def test_the_page_asks_for_public_names_alone(folder: Path) -> None:
    for path in folder.glob("*.py"):
        imported = re.findall(
            r"^from transformers_falcon_spec(?:\S*) import (.*)$", path.read_text(), flags=re.MULTILINE
        )

        assert not [name for names in imported for name in names.split(", ") if name.startswith("_")]
