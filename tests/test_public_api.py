"""What a user imports: sorted, documented, and cheap to import."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

PACKAGE = "transformers_falcon_spec"
# Transformers brings some of these itself; the package must add none.
LATE = (
    "datasets",
    "evaluate",
    "accelerate",
    "peft",
    "tensorboard",
    "pandas",
    "pyarrow",
    "rich",
    "transformers.trainer",
)
UNNEEDED = tuple(
    f"{PACKAGE}.{name}" for name in ("commands", "convert", "evaluation", "hub.", "serve", "training")
)  # by a call of `generate`
PLAIN = "import transformers; from transformers import LlamaConfig, PreTrainedModel, GenerationMixin"


@pytest.fixture
def package() -> ModuleType:
    return importlib.import_module(PACKAGE)


def late_modules(*statements: str) -> list[set[str]]:
    """Which of `LATE` and below `UNNEEDED` are loaded by each statement in a fresh interpreter that has loaded plain Transformers."""
    loaded = f"{{name for name in sys.modules if name in {LATE!r} or name.startswith({UNNEEDED!r})}}"
    lines = ["import sys", PLAIN]
    for statement in statements:
        lines += [f"before = {loaded}", statement, f"print(*({loaded} - before))"]
    command = [sys.executable, "-c", "\n".join(lines)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_all_is_sorted_without_repeats(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__))


def test_every_public_name_is_there(package: ModuleType) -> None:
    missing = [name for name in package.__all__ if not hasattr(package, name)]

    assert not missing


def test_every_public_name_is_documented(package: ModuleType) -> None:
    docs = {name: (getattr(package, name).__doc__ or "").strip() for name in package.__all__}

    bare = [name for name, doc in docs.items() if not doc or doc.startswith(f"{name}(")]  # dataclasses write their own
    assert not bare


def test_every_exception_is_public(package: ModuleType) -> None:
    errors = importlib.import_module(f"{PACKAGE}.errors")

    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}

    assert names <= set(package.__all__)


def test_importing_the_package_loads_nothing_that_only_training_or_evaluation_needs() -> None:
    statements = (f"import {PACKAGE}", "import datasets", f"import {PACKAGE}.hub.card")
    by_package, by_another, by_hub = late_modules(*statements)

    assert by_package == set()
    assert by_another >= {"datasets", "pyarrow"}  # so the check does find what is loaded late
    assert f"{PACKAGE}.hub.card" in by_hub


def test_the_version_is_that_of_the_installed_package(package: ModuleType) -> None:
    assert package.__version__ == version(PACKAGE)
