"""Write `docs/map.md`, the list of all modules, from the first sentence of each one's docstring.

Command: python tools/map.py (`make fix` runs it, and a test compares)
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "map.md"
FOLDERS = ("src/transformers_falcon_spec", "benchmarks", "examples", "tools")
HEAD = """# Map of the code

Every module says in the first sentence of its docstring what it is for; this page is rendered from those sentences by `make fix`.
Inside the package a module imports modules of its own folder and of lower layers only. From the bottom up the layers are `errors.py` and
`provenance.py`, `core/`, `generation/`, `drafters/`, `training/`, `evaluation/`, `convert/`, `hub/` and `serve/`, `commands/`, `cli.py`.
The tests mirror these folders: `tests/core/` tests `core/`, and so on.

To follow one token from `generate` to the text, read in `generation/`: `patch.py`, `call.py`, `loop.py`, `verifier.py`, `sequence_state.py` (processors and
draws), `sequence_batch.py` (criteria and streamer), `target.py` and `cache.py` (where the cache is cut). Masks of trees are made in `Target._mask`.
"""


def render(root: Path = ROOT) -> str:
    """The whole page: a section for each folder, with a table of its modules."""
    return "\n".join([HEAD, *(line for name in FOLDERS for line in _sections(root / name, name))])


def _sections(folder: Path, name: str) -> Iterator[str]:
    """The section of a folder, then those of the folders in it."""
    purpose = _purpose(folder / "__init__.py")
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    yield from [f"## `{name}/`", "", *([purpose, ""] if purpose else [])]
    if modules:
        yield from ["| module | what it is for |", "| --- | --- |"]
        yield from (f"| `{path.name}` | {_purpose(path)} |" for path in modules)
        yield ""
    for inner in sorted(path for path in folder.iterdir() if any(path.rglob("*.py"))):
        yield from _sections(inner, f"{name}/{inner.name}".removeprefix(f"{FOLDERS[0]}/"))


def _purpose(path: Path) -> str:
    """The first sentence of a module's docstring, or nothing."""
    if not path.exists():
        return ""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return (sentence + dot.strip()).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
