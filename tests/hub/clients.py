"""Other processes that know the Hub on localhost alone: one with Transformers and without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds
WITHOUT_PACKAGE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers_falcon_spec", "jaxtyping"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_client(script: str, folder: Path, url: str = "http://127.0.0.1:9", **settings: str) -> Any:
    """What `script` prints as JSON, run with an empty cache in `folder` and without this package.

    Raises:
        AssertionError: it failed; the message is what it said.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", **settings}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE + script],
        env={**kept, **settings, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
