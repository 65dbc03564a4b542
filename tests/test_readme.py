"""README and pages are true: their commands exist, their code compiles, their links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = ("src", "lab", "benchmarks", "tools", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
LOG = sorted(ROOT.glob("lab/log/*.md"))


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_the_map_of_the_folders_names_folders_that_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package, *inner = re.findall(r"^( *[\w/]+/)(?: |$)", blocks(page, "text")[0], flags=re.MULTILINE)
    paths = [f"{package}{name.strip()}" if name.startswith(" ") else name for name in inner]

    assert len(paths) == 12
    assert [path for path in [package, *paths] if not (ROOT / path).is_dir()] == []


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


def test_every_page_that_code_names_is_there() -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]

    named = {
        name for path in files for name in re.findall(r"\bdocs/\w+\.(?:md|html)\b", path.read_text(encoding="utf-8"))
    }

    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", [*PAGES, *LOG], ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))

    missing = [link for link in links if not (page.parent / link).exists()]

    assert not missing


def test_the_index_of_the_log_leads_to_every_theme() -> None:
    index = (ROOT / "lab" / "log" / "README.md").read_text(encoding="utf-8")

    linked = set(re.findall(r"\]\((\w+\.md)\)", index))

    assert linked == {page.name for page in LOG} - {"README.md"}
