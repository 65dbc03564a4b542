"""What `tools/measure_house.py` counts, on a checkout of two small files."""

import ast
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILE = '''"""A module. It has two sentences here."""


def first(values):
    """One sentence of six words, plain.

    Args:
        values: This does not count. Nor does this.
    """
    total = 0
    for value in values:
        total += value
    print(total)
    return total
'''


@pytest.fixture
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_house", ROOT / "tools" / "measure_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "src" / "two.py").write_text("import os  # noqa: F401\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("Hello.\n", encoding="utf-8")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "First"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_a_checkout_is_measured(house: ModuleType, checkout: Path) -> None:
    found = house.measured(checkout)

    assert (found["lines"], found["modules"], found["readme_bytes"]) == (15, 2, 7)
    assert (found["median_file"], found["longest_file"]) == (7.5, 14)
    assert (found["function_p90"], found["longest_function"]) == (11, 11)
    assert found["lint"] in ("F401 1 T201 1", "T201 1 F401 1")  # `noqa` or not
    assert found["words_per_sentence"] == pytest.approx((2 + 5 + 6) / 3)


def test_functions_that_differ_in_names_alone_are_of_one_shape(house: ModuleType) -> None:
    functions = [node for text in (FILE, FILE.replace("total", "other"), FILE.replace("+=", "-="))
                 for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]  # fmt: skip

    assert house.equal_functions(functions) == 1


def test_measurements_stand_side_by_side(house: ModuleType) -> None:
    table = house.table([{"commit": "old", "lines": 27464}, {"commit": "new", "lines": 21000, "import_ratio": 1.25}])

    lines = table.split("\n")
    assert lines[:3] == ["| commit | old | new |", "|---|---|---|", "| lines of `src` | 27,464 | 21,000 |"]
    assert "| the same over `transformers.GenerationMixin` | - | 1.25 |" in lines
