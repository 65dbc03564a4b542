"""Renders the file list of the README from the first sentence of every module. `make fix` runs it; a test compares."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/transformers_falcon_spec", "examples")
BEGIN, END = "<!-- tree:begin -->", "<!-- tree:end -->"


def render(root: Path = ROOT) -> str:
    """The list: a line for each folder and module, folders indented, purposes in one column."""
    entries = [entry for name in FOLDERS for entry in _entries(root / name, name, 0)]
    width = max(len(label) for label, _ in entries) + 2
    lines = [f"{label:{width}}{purpose}".rstrip() for label, purpose in entries]
    return "\n".join(["```text", *lines, "```"])


def _entries(folder: Path, name: str, depth: int) -> Iterator[tuple[str, str]]:
    """Label and purpose of a folder, then of its modules, then of the folders in it."""
    yield "  " * depth + name + "/", _purpose(folder / "__init__.py")
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield "  " * (depth + 1) + path.name, _purpose(path)
    for inner in sorted(path for path in folder.iterdir() if any(path.rglob("*.py"))):
        yield from _entries(inner, inner.name, depth + 1)


def _purpose(path: Path) -> str:
    """The first sentence of a module's docstring, or nothing."""
    if not path.exists():
        return ""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + dot.strip()


def between(text: str, begin: str = BEGIN, end: str = END) -> str:
    """What stands between the two markers."""
    return text.partition(begin)[2].partition(end)[0].strip()


def main() -> None:
    """Write the list into the README."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(f"{head}{BEGIN}\n{render()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
