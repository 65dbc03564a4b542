"""Tests stand where what they test stands: folders and file names mirror the package, and each folder has a lane that exists."""

from pathlib import Path

import pytest

from tests.conftest import FOLDERS, LANES

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "transformers_falcon_spec"
OF_OTHER_FOLDERS = {"benchmarks", "examples", "lab", "pretend", "trials"}  # of the repository, or of tests alone


def test_a_folder_of_tests_is_a_folder_or_a_module_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}

    assert [
        str(path)
        for path in folders
        if path.parts and path.parts[0] not in OF_OTHER_FOLDERS and not _is_there(SOURCE / path)
    ] == []


def _is_there(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def test_a_file_of_tests_named_after_a_module_stands_where_the_module_does() -> None:
    modules = {path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py")}
    names = {path.name for path in modules}
    modules |= {path.parent for path in modules if path.name == "__init__"}  # tests of a package may have its name
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    named = {
        file: file.parent / file.stem.removeprefix("test_")
        for file in files
        if file.parts[0] not in OF_OTHER_FOLDERS and not (SOURCE / file.parent).with_suffix(".py").exists()
    }

    assert [str(file) for file, module in named.items() if module.name in names and module not in modules] == []


def test_lanes_are_known_to_pytest_and_folders_of_lanes_are_there(pytestconfig: pytest.Config) -> None:
    known = {line.partition(":")[0] for line in pytestconfig.getini("markers")}

    assert LANES - known == set()
    assert [name for name, lane in FOLDERS.items() if not (TESTS / name).is_dir() or lane not in LANES] == []
