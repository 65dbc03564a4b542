"""Measures a checkout of this repository: how much code there is, how densely it is written, and what using it loads.

Command: python tools/measure_house.py [ROOT] [--json]

ROOT is a checkout, this one if left out. Of another commit: `git worktree add ../old COMMIT`, then name that folder. The Python that
runs this must have what the package needs; the package itself is taken from ROOT. Seconds need a quiet machine.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PACKAGE = "transformers_falcon_spec"
BESIDE = ("benchmarks", "tools", "lab")  # counted together with `src`
NUM_IMPORTS = 5
ROWS = {
    "commit": "commit",
    "statements": "statements of `src`, docstrings left out",
    "statements_with_tools": "the same of `src`, `benchmarks`, `tools` and `lab`",
    "files": "files of `src`",
    "lines": "lines of `src`",
    "nodes_per_statement": "nodes of the syntax tree a statement",
    "comprehensions": "comprehensions per 100 lines of function bodies",
    "blank_lines": "blank lines in function bodies, %",
    "import_modules": f"modules of `{PACKAGE}` that importing it loads",
    "import_seconds": "seconds of that import, Transformers' generation included",
    "step_functions": "functions that one warm greedy step enters",
    "step_files": "files that one warm greedy step enters",
    "docs_pages": "pages of `docs`",
    "docs_words": "words of `docs`",
    "saved_bytes": "bytes of a saved drafter beside its weights",
}

IMPORT = f"""
import json, sys, time
start = time.perf_counter()
import {PACKAGE}
seconds = time.perf_counter() - start
names = [name for name in sys.modules if name.split(".")[0] == {PACKAGE!r}]
print(json.dumps([len(names), seconds]))
"""

# A step is what happens from one forward of the target to the next one.
STEP = f"""
import inspect, json, sys, tempfile
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
import {PACKAGE} as package

root = Path(sys.argv[1])
target = AutoModelForCausalLM.from_pretrained(root / "models" / "reference-target")
tokenizer = AutoTokenizer.from_pretrained(root / "models" / "reference-target")
drafter = package.FalconSpecDrafter.from_pretrained(root / "models" / "falcon-reference")
drafter.generation_config.tune = False
inputs = tokenizer("Tom has three boxes of", return_tensors="pt")


def write():
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=48, do_sample=False)


write()
forward = inspect.unwrap(type(target).forward).__code__
source = str(Path(package.__file__).parent)
num_forwards = 0
entered = set()


def watch(frame, event, argument):
    global num_forwards
    if event != "call":
        return
    code = frame.f_code
    num_forwards += code is forward
    is_ours = code.co_filename.startswith(source)
    if num_forwards == 3 and is_ours:
        entered.add((code.co_filename, code.co_firstlineno))


sys.setprofile(watch)
write()
sys.setprofile(None)

with tempfile.TemporaryDirectory() as folder:
    drafter.save_pretrained(folder)
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    num_bytes = sum(path.stat().st_size for path in files)
print(json.dumps([len(entered), len({{name for name, line in entered}}), num_bytes]))
"""


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1], help="the checkout")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()

    root = args.root.resolve()
    found = of_files(root) | of_runs(root)
    print(json.dumps(found, indent=1) if args.json else table(found))


def table(found: dict[str, Any]) -> str:
    """A line for each figure."""
    width = max(map(len, ROWS.values()))
    return "\n".join(f"{title:{width}}  {_shown(found[name])}" for name, title in ROWS.items() if name in found)


def of_files(root: Path) -> dict[str, Any]:
    """What the files of a checkout say."""
    trees = parse(root / "src")
    bodies: list[str] = []
    num_lines = num_statements = num_nodes = num_comprehensions = 0
    for path, tree in trees.items():
        num_lines += len(path.read_text(encoding="utf-8").splitlines())
        bodies += body_lines(path, tree)
        num_statements += statements(tree)
        for node in ast.walk(tree):
            num_nodes += 1
            num_comprehensions += isinstance(node, COMPREHENSIONS)

    num_beside = 0
    for folder in BESIDE:
        num_beside += sum(map(statements, parse(root / folder).values()))

    num_blank = sum(not line.strip() for line in bodies)
    pages = [path.read_text(encoding="utf-8") for path in sorted((root / "docs").glob("*.md"))]

    return {
        "commit": _output("git", "-C", str(root), "describe", "--always", "--dirty").strip(),
        "statements": num_statements,
        "statements_with_tools": num_statements + num_beside,
        "files": len(trees),
        "lines": num_lines,
        "nodes_per_statement": num_nodes / max(num_statements, 1),
        "comprehensions": 100 * num_comprehensions / max(len(bodies), 1),
        "blank_lines": 100 * num_blank / max(len(bodies), 1),
        "docs_pages": len(pages),
        "docs_words": sum(map(words, pages)),
    }


def of_runs(root: Path) -> dict[str, Any]:
    """What importing the package loads, what a step enters, and what saving a drafter writes."""
    runs = [_run(root, IMPORT) for _ in range(1 + NUM_IMPORTS)]
    num_functions, num_files, num_bytes = _run(root, STEP)
    return {
        "import_modules": runs[0][0],
        "import_seconds": min(seconds for _, seconds in runs[1:]),
        "step_functions": num_functions,
        "step_files": num_files,
        "saved_bytes": num_bytes,
    }


def parse(folder: Path) -> dict[Path, ast.Module]:
    """The syntax tree of each file below a folder."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def statements(tree: ast.Module) -> int:
    """Statements of a file; docstrings and other bare constants do not count."""
    return sum(isinstance(node, ast.stmt) and not _is_constant(node) for node in ast.walk(tree))


def body_lines(path: Path, tree: ast.Module) -> list[str]:
    """The lines of a file that stand in the body of a function, its docstring left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Function):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                numbers |= set(range(body[0].lineno, node.end_lineno + 1))

    return [lines[number - 1] for number in sorted(numbers)]


def words(page: str) -> int:
    """Words and numbers of a page, its tables and code included; marks of Markdown alone do not count."""
    return sum(re.search(r"\w", word) is not None for word in page.split())


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _run(root: Path, code: str) -> Any:
    """What a program prints as its last line, with the package of `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code, str(root)]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
