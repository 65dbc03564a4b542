"""Writing the code that is published with a drafter: `custom_generate/`, with a loader or with all that it imports.

The loader takes drafter and decoding from this package, which must be installed. The copied code needs Transformers
alone. Transformers follows relative imports of remote code within one folder only, and requires every package that a
module imports. So `core/tree.py` becomes `core_tree.py`, imports are rewritten, and jaxtyping, whose annotations are
for readers and tests, is replaced by a stub. All other lines are copied unchanged, so that they can be compared with
the source.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path

from ..drafters.base import DrafterModel
from ..drafters.config_fields import update_config
from ..drafters.registry import methods
from ..errors import CheckpointError
from .custom_generate import CustomGenerate

FOLDER = "custom_generate"
_PACKAGE = __package__.partition(".")[0]
_SOURCE = Path(__file__).parents[1]
_TEMPLATES = Path(__file__).parent / "templates"
_SHAPES = "shapes"
_REQUIRED = ("huggingface_hub", "safetensors", "torch", "transformers", "typing_extensions")


def add_code(drafter_class: type[DrafterModel], folder: Path, with_code: bool) -> None:
    """Complete the folder of a saved drafter with the code that loads it and decodes with it.

    Args:
        drafter_class (`type[DrafterModel]`): The class of the drafter: of this package, or registered.
        folder (`Path`): The folder, which has a `config.json`.
        with_code (`bool`): Whether all code is copied, so that Transformers alone suffices; else a loader is written.

    Raises:
        [`CheckpointError`]: the class is neither of this package nor registered.
    """
    files = copied_code(drafter_class) if with_code else {"generate.py": loader_of(drafter_class)}  # type: ignore[arg-type]  # classes are hashable
    code = folder / FOLDER
    code.mkdir(exist_ok=True)
    for name, content in files.items():
        (code / name).write_text(content, encoding="utf-8")

    update_config(folder, auto_map=auto_map(drafter_class, with_code))


def auto_map(drafter_class: type[DrafterModel], with_code: bool) -> dict[str, str]:
    """The `auto_map` of `config.json`, by which `AutoModel` finds the published classes."""
    assert drafter_class.config_class is not None  # every drafter has one
    classes = {"AutoConfig": drafter_class.config_class, "AutoModel": drafter_class}
    found = {}
    for auto, kind in classes.items():
        module = flat_name(module_of(kind)) if with_code else "generate"
        found[auto] = f"{FOLDER}/{module}.{kind.__name__}"

    return found


def loader_of(drafter_class: type[DrafterModel]) -> str:
    """The loader, `generate.py`, of a drafter class."""
    config_class = drafter_class.config_class
    assert config_class is not None  # every drafter has one
    module = _import_module(drafter_class)
    own = module.partition(".")[0]
    template = (_TEMPLATES / "loader.txt").read_text(encoding="utf-8")

    return template.format(
        package=_PACKAGE,
        version=version(_PACKAGE),
        module=module,
        drafter=drafter_class.__name__,
        config_module=_import_module(config_class),
        config=config_class.__name__,
        others="" if own == _PACKAGE else f"; and `{own}`, which holds this kind of drafter",
    )


def _import_module(kind: type) -> str:
    """The module from which other software imports a class: this package, where the class is public."""
    module_of(kind)  # refuses what is not registered
    public = importlib.import_module(_PACKAGE)
    return _PACKAGE if getattr(public, kind.__name__, None) is kind else kind.__module__


@cache
def copied_code(drafter_class: type[DrafterModel]) -> dict[str, str]:
    """The code that needs Transformers alone, by name of its files: `generate.py`, modules, `requirements.txt`."""
    drafter = module_of(drafter_class)
    module = module_of(CustomGenerate)
    names = {"name": drafter_class.__name__, "drafter": flat_name(drafter), "module": flat_name(module)}

    files = {f"{flat_name(each)}.py": flattened(each) for each in sorted(closure({drafter, module}))}
    files["generate.py"] = (_TEMPLATES / "generate.txt").read_text(encoding="utf-8").format(**names)
    files[f"{_SHAPES}.py"] = (_TEMPLATES / "shapes.txt").read_text(encoding="utf-8")

    required = {re.split(r"[^\w-]", line)[0].replace("-", "_"): line for line in requires(_PACKAGE) or ()}
    files["requirements.txt"] = "".join(f"{required[name]}\n" for name in _REQUIRED)

    return files


def module_of(kind: type) -> str:
    """The name of a class's module: within this package, or in full for a registered drafter of another package."""
    package, _, name = kind.__module__.partition(".")
    if package == _PACKAGE:
        return name
    if any(kind in (method.drafter, method.config_class) for method in methods().values()):  # registered
        return kind.__module__

    raise CheckpointError(
        f"Published code is made from the modules of `{_PACKAGE}`, but `{kind.__name__}` comes from "
        f"`{kind.__module__}`. Load the drafter with a class of the package."
    )


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
