"""`docs/extending.md` as a newcomer follows it: a drafter from outside the package, through public names alone, from training to the Hub."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)

# Starting a process takes seconds: some commands share one.
IN_ONE_PROCESS = """
import shlex, sys
from transformers_falcon_spec.cli import main

for command in sys.argv[1:]:
    name, *options = shlex.split(command)
    assert name == "falcon-spec" and main(options) == 0, command
"""
IN_TURN = """
import runpy

for script in ("use.py", "verify.py"):
    runpy.run_path(script, run_name="__main__")
    print("ran", script)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, in the order in which it shows them, and the drafter that its commands train."""
    folder = tmp_path_factory.mktemp("extending")
    for found in FILE.finditer(PAGE):
        (folder / found["name"]).write_text(found["code"], encoding="utf-8")
    for name in ("models", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)

    training, _ = COMMANDS.findall(PAGE)
    asking, *commands = training.replace("\\\n", "").splitlines()
    run(folder, "bash", "-e", "-c", asking)
    for some in (commands[:2], commands[2:]):
        run(folder, sys.executable, "-c", IN_ONE_PROCESS, *some)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What the scripts of the page print.

    They assert what the page says: the text is the target's own and drafts are accepted; with the verifier it is the text of
    the seed, and a step keeps one drafted token at most.
    """
    return run(folder, sys.executable, "-c", IN_TURN)


def run(folder: Path, *command: str) -> str:
    """What a command or a script of the page prints, run on its own as a reader runs it."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_commands_train_and_measure_a_drafter_from_outside(folder: Path) -> None:
    measured = json.loads((folder / "speed.json").read_text(encoding="utf-8"))

    assert json.loads((folder / "my-bigrams" / "config.json").read_text("utf-8"))["model_type"] == "bigrams"
    assert [row["num_identical"] for row in measured["rows"]] == [1]


def test_a_drafter_from_outside_is_loaded_and_published(folder: Path) -> None:
    _, publishing = COMMANDS.findall(PAGE)
    run(folder, "bash", "-e", "-c", publishing)

    config = json.loads((folder / "published" / "config.json").read_text(encoding="utf-8"))
    card = (folder / "published" / "README.md").read_text(encoding="utf-8")

    assert config["model_type"] == "bigrams"
    assert "Bigrams" in card


def test_a_drafter_from_outside_is_served(folder: Path) -> None:
    pair = ["--target", "models/reference-target", "--drafter", "my-bigrams"]
    command = ["falcon-spec", "serve", "--import", "bigram_method", *pair, "--port", "0"]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    body = json.dumps({"model": "models/reference-target", "prompt": "Tom has 3 boxes", "max_tokens": 4}).encode()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = json.load(response)
        finally:
            server.terminate()

    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("script", ["use.py", "verify.py"])
def test_a_drafter_and_a_verifier_from_outside_are_used(script: str, printed: str) -> None:
    assert f"ran {script}" in printed.splitlines()


def test_the_page_asks_for_public_names_alone(folder: Path) -> None:
    for path in folder.glob("*.py"):
        imported = re.findall(
            r"^from transformers_falcon_spec(?:\S*) import (.*)$", path.read_text(), flags=re.MULTILINE
        )

        assert not [name for names in imported for name in names.split(", ") if name.startswith("_")]
