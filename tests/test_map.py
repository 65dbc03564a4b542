"""`docs/map.md` is what the modules say of themselves, and names every one of them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("map", ROOT / "tools" / "map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_is_what_the_modules_say(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "Run `make fix`."


def test_every_module_says_what_it_is_for(tool: ModuleType) -> None:
    silent = [line for line in tool.render().splitlines() if line.startswith("| `") and line.endswith("` |  |")]

    assert silent == []


def test_the_map_names_every_module(tool: ModuleType) -> None:
    page = tool.render()
    paths = [path for folder in tool.FOLDERS for path in (ROOT / folder).rglob("*.py")]

    assert [path.name for path in paths if path.stem != "__init__" and f"| `{path.name}` |" not in page] == []
