"""The wheel that `python -m build` makes: its page on an index is whole, and it works without the repository."""

import os
import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.commands, pytest.mark.slow]  # packages are fetched, and a wheel is built from an archive

ROOT = Path(__file__).parents[1]
PAIR = ["--target", str(ROOT / "models" / "reference-target"), "--drafter", str(ROOT / "models" / "falcon-reference")]
# The first argument is the folder of the wheel, the others are those of the command.
FALCON_SPEC = """
import sys
import transformers_falcon_spec
from transformers_falcon_spec.cli import main

assert transformers_falcon_spec.__file__.startswith(sys.argv[1]), transformers_falcon_spec.__file__
sys.exit(main(sys.argv[2:]))
"""


def run(*arguments: str | Path, folder: Path, found: Path | None = None, status: int = 0) -> str:
    """Run Python in `folder`, where it finds packages in `found` before those of its environment; it must succeed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=variables | ({} if found is None else {"PYTHONPATH": str(found)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the wheel is installed, without what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    tools, dist, installed = folder / "tools", folder / "dist", folder / "installed"
    of_wheel = ["--no-deps", "--no-index", "--find-links", dist, "transformers_falcon_spec"]
    run("-m", "pip", "install", "-q", "--target", tools, "build", folder=folder)
    run("-m", "build", "--outdir", dist, ROOT, folder=folder, found=tools)
    run("-m", "pip", "install", "-q", "--target", installed, *of_wheel, folder=folder)
    assert sorted(path.suffix for path in dist.iterdir()) == [".gz", ".whl"]
    return installed


def falcon_spec(installed: Path, folder: Path, *arguments: str, status: int = 0) -> str:
    return run("-c", FALCON_SPEC, installed, *arguments, folder=folder, found=installed, status=status)


def test_the_page_on_an_index_leads_nowhere_that_an_index_lacks(installed: Path) -> None:
    metadata = Distribution.at(next(installed.glob("*.dist-info"))).metadata
    page = metadata.get_payload()

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2412.12639"]
    assert re.findall(r"\]\((?!https://)[^)]*\)", page) == []
    assert "![" not in page
    assert "*One step: the drafter proposes a tree below" in page
    assert "[arXiv 2412.12639](https://arxiv.org/abs/2412.12639)" in page
    assert page.count("\n## ") == (ROOT / "README.md").read_text(encoding="utf-8").count("\n## ")


def test_the_wheel_writes_the_text_of_the_target_alone(installed: Path, tmp_path: Path) -> None:
    options = ["--prompt", "Tom has 3 boxes of 12 pencils.", "--max_new_tokens", "16", "--compare"]

    shown = falcon_spec(installed, tmp_path, "generate", *PAIR, *options)

    assert "identical" in shown


def test_the_wheel_holds_its_program_which_shows_the_help_of_commands(installed: Path, tmp_path: Path) -> None:
    shown = run(installed / "bin" / "falcon-spec", "train", "--help", folder=tmp_path, found=installed)

    assert "falcon-spec train: distil a drafter from a target" in shown
    assert "(required)" in shown


def test_the_wheel_writes_drafters_with_their_card(installed: Path, tmp_path: Path) -> None:
    names = [PAIR[-1], "someone/falcon", "--target", "someone/target"]

    falcon_spec(installed, tmp_path, "publish", *names, "--output", "published")

    written = {path.relative_to(tmp_path / "published").as_posix() for path in (tmp_path / "published").rglob("*")}
    assert {"README.md", "config.json"} <= written
