"""Who may import whom. A module imports its own layer and lower ones; a new module gets an entry in `LAYERS`."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "transformers_falcon_spec"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Bottom up; names side by side are one layer.
LAYERS = (
    {"errors", "provenance", "transformers_versions"},
    {"core"},
    {"generation"},
    {"drafters"},
    {"records"},
    {"training"},
    {"evaluation"},
    {"hub", "convert", "serve"},
    {"commands"},
    {"cli", "__main__"},
    {"__init__"},
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The generate path needs nothing beyond these; layers not named here may import any dependency.
DECODING = {"huggingface_hub", "jaxtyping", "torch", "transformers", "typing_extensions"}
PACKAGES = {
    "errors": set(),
    "provenance": DECODING,
    "transformers_versions": {"transformers"},
    "core": {"jaxtyping", "torch", "typing_extensions"},
    "generation": DECODING,
    "drafters": DECODING | {"safetensors"},  # for its errors
}
# The modules of training that may use `generation`: hooks and head, the masks that kinds of layers take, and what decoding with a drafter brings.
TRAINING_THAT_DECODES = {"training.features", "training.metrics"}


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    name: str
    line: int
    is_type_only: bool

    @property
    def layer(self) -> str | None:
        """The layer inside this package, `__init__` for the package itself, None for other packages."""
        root, _, rest = self.name.partition(".")
        return (rest.partition(".")[0] or "__init__") if root == PACKAGE else None


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`, a dotted name below the package."""
    layer = module.partition(".")[0]
    if layer not in RANKS:
        return [f"`{module}` has no layer: give it an entry in `LAYERS`."]
    found = []
    for each in imports(module, source, is_package):
        if (reason := _reason(module, layer, each)) is not None:
            found.append(f"`{module}` line {each.line} imports `{each.name}`: {reason}")
    return found


def imports(module: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a file, also those inside functions."""
    tree = ast.parse(source)
    type_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    parts = [PACKAGE, *module.split(".")]
    parents = parts if is_package else parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [prefix] if node.module else [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(name, node.lineno, id(node) in type_only) for name in names)


def _reason(module: str, layer: str, each: Import) -> str | None:
    """Why this import is refused, or None."""
    if each.layer is None:
        top = each.name.partition(".")[0]
        is_free = top in sys.stdlib_module_names or layer not in PACKAGES or top in PACKAGES[layer]
        return None if is_free else f"`{layer}` needs nothing beyond {sorted(PACKAGES[layer])}."
    if RANKS.get(each.layer, len(LAYERS)) > RANKS[layer]:
        return f"`{each.layer}` is no layer below `{layer}`."
    is_training_exempt = each.is_type_only or module in TRAINING_THAT_DECODES
    if (layer, each.layer) == ("training", "generation") and not is_training_exempt:
        return f"training uses `generation` in {sorted(TRAINING_THAT_DECODES)} alone."
    return None


def module_name(path: Path) -> str:
    """`core.tree` for `core/tree.py`, `core` for `core/__init__.py`, `__init__` for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def test_a_module_imports_only_its_own_layer_and_lower_ones() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = module_name(path)
        is_package = path.name == "__init__.py" and name != "__init__"
        found += violations(name, path.read_text(encoding="utf-8"), is_package)

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.tree", "import transformers"),
        ("core.tree", "from transformers.cache_utils import Cache"),
        ("core.tree", "def f():\n    import numpy"),
        ("core.tree", "from ..generation.loop import run"),
        ("errors", "import torch"),
        ("generation.loop", "from ..drafters.falcon import FalconSpecDrafter"),
        ("generation.loop", "from .. import drafters"),
        ("generation.loop", f"import {PACKAGE}.drafters"),
        ("generation.loop", f"from {PACKAGE} import FalconSpecDrafter"),
        ("generation.loop", "import datasets"),
        ("drafters.falcon", "from ..training.objectives import loss"),
        ("training.dataset", "from ..generation.loop import run"),
        ("training.trainer", "from ..evaluation.benchmark import run"),
        ("evaluation.benchmark", "from ..cli import main"),
        ("misplaced", ""),
    ],
)
def test_the_check_finds_what_breaks_a_layer(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "core.tree",
            "import torch\nfrom jaxtyping import Int\nfrom ..errors import DraftTreeError\nfrom . import masks",
        ),
        ("generation.loop", "from ..core.tree import DraftTree\nfrom transformers import Cache"),
        ("drafters.falcon", "from ..generation.drafting import Draft\nfrom .base import DrafterModel"),
        ("training.features", "from ..generation.target import Target"),
        ("training.dataset", "if TYPE_CHECKING:\n    from ..generation.drafting import TargetView"),
        ("evaluation.benchmark", "import datasets\nfrom ..generation.loop import run"),
        ("hub.card", "from ..convert.formats import detect"),
        ("__init__", "from .core.tree import DraftTree\nfrom .cli import main"),
    ],
)
def test_the_check_lets_the_rest_pass(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_a_relative_import_counts_from_the_package_in_an_init_file() -> None:
    found = [each.name for each in imports("drafters.falcon", "from .plan import plan\nfrom .. import base", True)]

    assert found == [f"{PACKAGE}.drafters.falcon.plan", f"{PACKAGE}.drafters.base"]
