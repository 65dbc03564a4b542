"""Opening pages in Chromium, which another Python may have."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def seen_in_a_browser(page: Path, width: int, scheme: str) -> dict[str, Any]:
    """What a reader sees of a page in a window of this width, `light` or `dark`; skips without a browser."""
    return said_by_chromium([str(Path(__file__).with_name("browser.py")), str(page), str(width)], scheme)


def said_by_chromium(script: list[str], scheme: str, seconds: float = 120) -> dict[str, Any]:
    """The output of a script that a Python with Chromium runs, `light` or `dark`; skips without a browser."""
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    environment = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
    command = [_python(), *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def _python() -> str:
    """A Python that has PyQt6-WebEngine."""
    if "FALCON_SPEC_BROWSER_PYTHON" in os.environ:
        return os.environ["FALCON_SPEC_BROWSER_PYTHON"]
    if find_spec("PyQt6") is None or find_spec("PyQt6.QtWebEngineCore") is None:
        pytest.skip("PyQt6-WebEngine is not installed, nor does FALCON_SPEC_BROWSER_PYTHON name a Python that has it")
    return sys.executable
