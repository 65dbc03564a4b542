"""One drafter and all that it imports of this package, as flat modules beside a `generate.py`.

Transformers follows relative imports of remote code within one folder only, and asks for every package that a module
imports. So `core/tree.py` becomes `core_tree.py`, imports are spelled anew, and the names of jaxtyping, which say
shapes to readers and tests, come from a stand-in. All other lines stay as they are, so that they can be read and
compared with the source.
"""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path

from ..drafters.base import DrafterModel
from ..errors import CheckpointError
from .custom_generate import CustomGenerate

FOLDER = "custom_generate"
_PACKAGE = __package__.partition(".")[0]
_SOURCE = Path(__file__).parents[1]
_SHAPES = "shapes"
_REQUIRED = ("huggingface_hub", "safetensors", "torch", "transformers", "typing_extensions")

_SHAPES_MODULE = '''"""Names of jaxtyping, to read: `Float[Tensor, "rows tokens"]` is a tensor; nothing is checked."""

from torch import Tensor


class _Shaped:
    def __class_getitem__(cls, _: object) -> type:
        return Tensor


class Bool(_Shaped):
    """Truth values."""


class Float(_Shaped):
    """Numbers of any precision."""


class Int(_Shaped):
    """Whole numbers."""


class Shaped(_Shaped):
    """Any values."""
'''

_GENERATE_MODULE = '''"""Writes faster: `target.generate(..., custom_generate=REPO, trust_remote_code=True)`."""

from .{drafter} import {name}
from .{recipe} import CustomGenerate

generate = CustomGenerate({name}, __file__).generate
'''


def write_custom_generate(drafter_class: type[DrafterModel], folder: Path) -> None:
    """Write `custom_generate/` for drafters of a class into `folder`: `generate.py`, its modules, `requirements.txt`.

    Raises:
        [`CheckpointError`]: the class is no part of this package.
    """
    start = {module_of(drafter_class), module_of(CustomGenerate)}
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    for module in sorted(closure(start)):
        (place / f"{flat_name(module)}.py").write_text(flattened(module), encoding="utf-8")
    names = {"drafter": flat_name(module_of(drafter_class)), "recipe": flat_name(module_of(CustomGenerate))}
    generate = _GENERATE_MODULE.format(name=drafter_class.__name__, **names)
    (place / "generate.py").write_text(generate, encoding="utf-8")
    (place / f"{_SHAPES}.py").write_text(_SHAPES_MODULE, encoding="utf-8")
    (place / "requirements.txt").write_text("\n".join(requirements()) + "\n", encoding="utf-8")


def auto_map(drafter_class: type[DrafterModel]) -> dict[str, str]:
    """What `config.json` must say so that `AutoModel` finds the modules of the recipe."""
    assert drafter_class.config_class is not None  # every drafter has one
    classes = {"AutoConfig": drafter_class.config_class, "AutoModel": drafter_class}
    return {auto: f"{FOLDER}/{flat_name(module_of(kind))}.{kind.__name__}" for auto, kind in classes.items()}


def requirements() -> list[str]:
    """Packages that the recipe imports, in the versions that this package asks for."""
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_"): line for line in requires(_PACKAGE) or ()}
    return [declared[name] for name in _REQUIRED]


def module_of(kind: type) -> str:
    """The module of a class, as a dotted name below the package.

    Raises:
        [`CheckpointError`]: it is in none of them.
    """
    package, _, name = kind.__module__.partition(".")
    if package != _PACKAGE:
        raise CheckpointError(
            f"A recipe is made from the modules of `{_PACKAGE}`, but `{kind.__name__}` comes from "
            f"`{kind.__module__}`. Load the drafter with a class of the package."
        )
    return name


def flat_name(module: str) -> str:
    """The name of a module in the recipe's folder.

    ```python
    >>> flat_name("generation.loop")
    'generation_loop'

    ```
    """
    return module.replace(".", "_")


def closure(modules: set[str]) -> set[str]:
    """These modules and all of the package that they import, however far."""
    found: set[str] = set()
    waiting = set(modules)
    while waiting:
        module = waiting.pop()
        found.add(module)
        waiting |= {name for _, names in _relative_imports(module) for name in names.values()} - found
    return found


def flattened(module: str) -> str:
    """The source of a module, its imports as they must be in the recipe's folder, and a line with its origin."""
    lines = _path(module).read_text(encoding="utf-8").splitlines()
    for node, names in _relative_imports(module):
        lines[node.lineno - 1] = _respelled(lines[node.lineno - 1], node, names)
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"^from jaxtyping import", f"from .{_SHAPES} import", line)
    path = _path(module).relative_to(_SOURCE.parent).as_posix()
    head = f"# {path} of {_PACKAGE} {version(_PACKAGE)}, Apache-2.0; made flat by {_PACKAGE}.hub.bundle."
    return "\n".join([head, *lines]) + "\n"


def _respelled(line: str, node: ast.ImportFrom, names: dict[str, str]) -> str:
    """The first line of an import, which holds the module, or the modules where it is `from . import ...`."""
    if node.module is not None:
        return line.replace(f"from {'.' * node.level}{node.module} import", f"from .{flat_name(names[''])} import", 1)
    parts = [f"{flat_name(names[each.name])} as {each.asname or each.name}" for each in node.names]
    return line[: node.col_offset] + f"from . import {', '.join(parts)}"


def _relative_imports(module: str) -> Iterator[tuple[ast.ImportFrom, dict[str, str]]]:
    """Imports inside the package, each with its modules by the name they get; '' where the import names it."""
    path = _path(module)
    parts = module.split(".")
    parents = parts if path.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parents[: len(parents) - node.level + 1]
            named = {"": node.module} if node.module else {each.name: each.name for each in node.names}
            yield node, {name: ".".join([*base, target]) for name, target in named.items()}


def _path(module: str) -> Path:
    """The file of a module."""
    path = _SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
