"""The README is true: its commands exist, its code compiles, its links lead somewhere, its file list is complete."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tree", ROOT / "tools" / "readme_tree.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"^make (\S+)", blocks(README, "bash")[0], flags=re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_command_in_the_pages_is_a_target(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)

    named = re.findall(r"(?:^|`)(?:\w+=\S+ )*make ([a-z-]+)", text, flags=re.MULTILINE)

    assert set(named) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))

    missing = [link for link in links if not (page.parent / link).exists()]

    assert not missing


def test_the_file_list_is_what_the_modules_say(tree: ModuleType) -> None:
    assert tree.between(README) == tree.render(), "Run `make fix`."


def test_the_file_list_names_every_python_file(tree: ModuleType) -> None:
    listed = tree.between(README)
    paths = [path for folder in tree.FOLDERS for path in (ROOT / folder).rglob("*.py")]

    missing = [path.name if path.stem != "__init__" else f"{path.parent.name}/" for path in paths]
    missing = [name for name in missing if name not in listed]

    assert not missing, "Run `make fix`."
