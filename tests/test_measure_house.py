"""What `tools/measure_house.py` counts, on a checkout of two small files."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FIRST = '''"""A module."""

from . import second


def first(values):
    """One sentence."""
    total = sum(value for value in values)

    return total
'''
SECOND = "from .first import first\n\nNUMBER = 1\n"


@pytest.fixture
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_house", ROOT / "tools" / "measure_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "package"
    for folder in (package, tmp_path / "tools", tmp_path / "docs"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "first.py").write_text(FIRST, encoding="utf-8")
    (package / "second.py").write_text(SECOND, encoding="utf-8")
    (tmp_path / "tools" / "tool.py").write_text("print(1)\n", encoding="utf-8")
    (tmp_path / "docs" / "page.md").write_text("# Four words\n\n| stand | here |\n", encoding="utf-8")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_checkout_is_measured(house: ModuleType, checkout: Path) -> None:
    found = house.of_files(checkout)

    assert (found["statements"], found["statements_with_tools"], found["files"]) == (6, 7, 3)
    assert found["comprehensions"] == pytest.approx(100 / 3)
    assert found["blank_lines"] == pytest.approx(100 / 3)
    assert (found["docs_pages"], found["docs_words"]) == (1, 4)


def test_every_figure_has_a_line(house: ModuleType, checkout: Path) -> None:
    found = house.of_files(checkout)

    lines = house.table(found).splitlines()

    assert len(lines) == len(found)
    assert lines[1].endswith("  6")
