"""The side-by-side page in Chromium: a prompt is typed, the button pressed, and both texts, speeds and trees appear as they are written."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.opening import said_by_chromium

ROOT = Path(__file__).parents[2]
PROMPT = "Write a short story about a dog that finds a bone."

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of the embedded pair, served by a process of its own; it drafts in every step, for a tuner goes by the clock."""
    drafter = tmp_path_factory.mktemp("untuned") / "drafter"
    shutil.copytree(ROOT / "models" / "falcon-reference", drafter)
    options = drafter / "generation_config.json"
    options.write_text(json.dumps({**json.loads(options.read_text(encoding="utf-8")), "tune": False}))
    command = [sys.executable, "-u", "examples/07_side_by_side.py", "--port", "0", "--drafter", str(drafter)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(found.group() for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            server.terminate()


@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_writes_both_texts_and_shows_trees_as_they_grow(
    url: str, width: int, scheme: str, tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"

    script = [str(Path(__file__).with_name("live_page.py")), url, str(width), PROMPT, str(picture)]
    said = said_by_chromium(script, scheme, seconds=300)

    *growing, last = said["seen"]
    assert re.search(r"\d\.\d\dx as fast, the same text", last["verdict"])
    assert float(re.search(r"acceptance length (\d\.\d\d)", last["verdict"]).group(1)) > 1
    assert last["alone"] == last["drafted"] != ""
    assert all(re.search(r"\d+\.\d tokens/s", last[f"{side}_speed"]) for side in ("alone", "drafted"))
    assert re.search(r"Step \d+: \d+ of \d+ drafted tokens kept", last["tree_title"])
    assert last["has_plot"]
    assert any(state["nodes"] and 0 < len(state["drafted"]) < len(last["drafted"]) for state in growing)
    assert any(0 < len(state["alone"]) < len(last["alone"]) and not state["drafted"] for state in growing)
    assert not last["is_wide"]
    assert last["elsewhere"] == []
    assert picture.stat().st_size > 0
