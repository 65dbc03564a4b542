"""Processes with Transformers but without this package, whose only Hub is the one on localhost."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 1200  # seconds; a machine may be busy
WITHOUT_PACKAGE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers_falcon_spec", "jaxtyping"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def make_environment(folder: Path) -> Path:
    """The interpreter of a new environment with PyTorch and Transformers in the versions of this one."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    versions = {found.metadata["Name"]: found.version for found in distributions()}
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-compile", "-c", pins, "torch", "transformers"], check=True
    )
    return python


def run_client(
    script: str, folder: Path, url: str = "http://127.0.0.1:9", python: Path | None = None, **settings: str
) -> Any:
    """What `script` prints as JSON, run with an empty cache in `folder` and without this package.

    `python` is an interpreter that does not have it; this one must not import it.

    Raises:
        AssertionError: it failed; the message is its output.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", **settings}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE + script] if python is None else [python, "-c", script],
        env={**kept, **settings, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
