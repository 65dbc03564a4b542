"""Writing the code that is published with a drafter: `custom_generate/` with all modules that it imports.

Transformers follows relative imports of remote code within one folder only, and requires every package that a module
imports. So `core/tree.py` becomes `core_tree.py`, imports are rewritten, and jaxtyping, whose annotations are for
readers and tests, is replaced by a stub. All other lines are copied unchanged, so that they can be compared with the
source.
"""

import ast
import importlib
import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path

from ..drafters.base import DrafterModel
from ..drafters.registry import METHODS
from ..errors import CheckpointError
from .custom_generate import CustomGenerate

logger = logging.getLogger(__name__)
FOLDER = "custom_generate"
_PACKAGE = __package__.partition(".")[0]
_SOURCE = Path(__file__).parents[1]
_SHAPES = "shapes"
_REQUIRED = ("huggingface_hub", "safetensors", "torch", "transformers", "typing_extensions")


def add_code(drafter_class: type[DrafterModel], folder: Path) -> None:
    """Complete the folder of a saved drafter with its code, so that `AutoModel` loads it without this package."""
    if not is_registered(drafter_class) or drafter_class.__module__ == "__main__":
        logger.info(
            "No code is saved with a `%s`: define it in a module, and register it with `register_drafter`.",
            drafter_class.__name__,
        )
        return
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "auto_map": auto_map(drafter_class)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_custom_generate(drafter_class, folder)


def write_custom_generate(drafter_class: type[DrafterModel], folder: Path) -> None:
    """Write the folder `custom_generate/` for a drafter class: `generate.py`, its modules and `requirements.txt`.

    Raises:
        [`CheckpointError`]: the class is neither of this package nor registered.
    """
    code = folder / FOLDER
    code.mkdir(parents=True, exist_ok=True)
    for file, content in _files(drafter_class).items():  # type: ignore[arg-type]  # classes are hashable
        (code / file).write_text(content, encoding="utf-8")


@cache
def _files(drafter_class: type[DrafterModel]) -> dict[str, str]:
    """The content of each file, by name; it is the same in every folder that is saved."""
    drafter, module = (module_of(kind) for kind in (drafter_class, CustomGenerate))
    names = {"name": drafter_class.__name__, "drafter": flat_name(drafter), "module": flat_name(module)}
    files = {f"{flat_name(each)}.py": flattened(each) for each in sorted(closure({drafter, module}))}
    templates = Path(__file__).parent / "templates"
    files["generate.py"] = (templates / "generate.txt").read_text(encoding="utf-8").format(**names)
    files[f"{_SHAPES}.py"] = (templates / "shapes.txt").read_text(encoding="utf-8")
    return {**files, "requirements.txt": "\n".join(requirements()) + "\n"}


def auto_map(drafter_class: type[DrafterModel]) -> dict[str, str]:
    """The `auto_map` of `config.json`, by which `AutoModel` finds the published classes."""
    assert drafter_class.config_class is not None  # every drafter has one
    classes = {"AutoConfig": drafter_class.config_class, "AutoModel": drafter_class}
    return {auto: f"{FOLDER}/{flat_name(module_of(kind))}.{kind.__name__}" for auto, kind in classes.items()}


def requirements() -> list[str]:
    """The packages that the published code imports, with the versions that this package requires."""
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_"): line for line in requires(_PACKAGE) or ()}
    return [declared[name] for name in _REQUIRED]


def module_of(kind: type) -> str:
    """The name of a class's module: within this package, or in full for a registered drafter of another package."""
    package, _, name = kind.__module__.partition(".")
    if package == _PACKAGE:
        return name
    if is_registered(kind):
        return kind.__module__
    raise CheckpointError(
        f"Published code is made from the modules of `{_PACKAGE}`, but `{kind.__name__}` comes from "
        f"`{kind.__module__}`. Load the drafter with a class of the package."
    )


def is_registered(kind: type) -> bool:
    """Whether this is a class of a registered drafter, or of its configuration."""
    return any(kind in (method.drafter, method.config_class) for method in METHODS.values())


def flat_name(module: str) -> str:
    """The name of a module in the folder of the published code, such as `generation_loop` for `generation.loop`."""
    return module.replace(".", "_")


def closure(modules: set[str]) -> set[str]:
    """These modules and all modules of the package that they import, directly or not."""
    found: set[str] = set()
    waiting = set(modules)
    while waiting:
        module = waiting.pop()
        found.add(module)
        waiting |= {name for _, names in _relative_imports(module) for name in names.values()} - found
    return found


def flattened(module: str) -> str:
    """The source of a module with flat relative imports, and a first line that names its origin."""
    lines = _path(module).read_text(encoding="utf-8").splitlines()
    for node, names in _relative_imports(module):
        lines[node.lineno - 1] = _rewritten(lines[node.lineno - 1], node, names)
        if "" not in names:  # the whole import is in the first line now
            lines[node.lineno : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno)
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"^from jaxtyping import", f"from .{_SHAPES} import", line)
    origin = _path(module).name
    if _path(module).is_relative_to(_SOURCE):
        path = _path(module).relative_to(_SOURCE.parent).as_posix()
        origin = f"{path} of {_PACKAGE} {version(_PACKAGE)}, Apache-2.0"
    return "\n".join([f"# {origin}; made flat by {_PACKAGE}.hub.bundle.", *lines]) + "\n"


def _rewritten(line: str, node: ast.ImportFrom, names: dict[str, str]) -> str:
    """The first line of an import, with the flat name of each module."""
    if "" in names:
        return line.replace(f"from {'.' * node.level}{node.module} import", f"from .{flat_name(names[''])} import", 1)
    if node.module is not None:  # public names, from where each is defined
        found = [f"from .{flat_name(names[each.name])} import {ast.unparse(each)}" for each in node.names]
        return "\n".join(line[: node.col_offset] + each for each in found)  # Transformers reads whole lines
    parts = [f"{flat_name(names[each.name])} as {each.asname or each.name}" for each in node.names]
    return line[: node.col_offset] + f"from . import {', '.join(parts)}"


def _relative_imports(module: str) -> Iterator[tuple[ast.ImportFrom, dict[str, str]]]:
    """The imports that are rewritten, with the modules that each loads; '' is the key for `from module import`."""
    path = _path(module)
    parts = module.split(".")
    parents = parts if path.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = parents[: len(parents) - node.level + 1]
            named = {"": node.module} if node.module else {each.name: each.name for each in node.names}
            yield node, {name: ".".join([*base, target]) for name, target in named.items()}
        elif node.module == _PACKAGE:
            public = importlib.import_module(_PACKAGE)
            yield node, {each.name: module_of(getattr(public, each.name)) for each in node.names}
        elif str(node.module).startswith(f"{_PACKAGE}."):
            yield node, {"": str(node.module).partition(".")[2]}


def _path(module: str) -> Path:
    """The source file of a module."""
    path = _SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.exists() else Path(str(importlib.import_module(module).__file__))
