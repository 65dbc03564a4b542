"""Measures a checkout of this repository: its size, its style, its import time; and prints several measurements side by side.

On another commit: `git worktree add ../old 9c4ffdc`, then `python tools/measure_house.py --root ../old --output old.json`, and
`python tools/measure_house.py --table old.json new.json`. Times need a quiet machine. Duplicate pairs are counted by the command `duplicates`
where there is one.
"""

import argparse
import ast
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
RULES = "F403,F405,PLC0415,E722,BLE001,ERA001,T201,S307,B006,C901,PLR0913,PLR0915,F401,F811,F821,F841"  # star and late imports, ...
LIMITS = ("lint.mccabe.max-complexity=8", "lint.pylint.max-args=7", "lint.pylint.max-statements=35")
BASE_IMPORT = "from transformers import GenerationMixin"
NUM_RUNS = 5
LEAST_EQUAL_LINES = 5  # of functions that count as the same
ROWS = {
    "commit": "commit",
    "lines": "lines of `src`",
    "modules": "modules",
    "median_file": "median file, lines",
    "longest_file": "longest file, lines",
    "function_p90": "nine functions in ten have at most, lines",
    "longest_function": "longest function, lines",
    "lint_per_1000": "lint findings a 1,000 lines",
    "lint": "lint findings",
    "duplicate_pairs": "duplicate pairs (`duplicates`, 6 lines)",
    "equal_functions": f"pairs of functions of one shape, {LEAST_EQUAL_LINES} lines or more",
    "words_per_sentence": "words in a docstring's sentence",
    "import_seconds": "`import transformers_falcon_spec`, s",
    "import_ratio": "the same over `transformers.GenerationMixin`",
    "help_seconds": "`falcon-spec --help`, s",
    "test_seconds": "`make test`, s",
    "readme_bytes": "README, bytes",
}


def main() -> None:
    """Measure, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="the checkout; this one if left out"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write; the table is printed anyway")
    parser.add_argument("--test-seconds", type=float, help="what `make test` took")
    parser.add_argument("--without-times", action="store_true", help="measure no import and help times")
    parser.add_argument("--table", type=Path, nargs="+", help="print these measurements; measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in args.table]))
        return
    found = measured(args.root.resolve()) | {"test_seconds": args.test_seconds}
    found |= {} if args.without_times else times(args.root.resolve())
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table([found]))


def table(measurements: list[dict[str, Any]]) -> str:
    """A row for each figure, a column for each measurement, in Markdown."""
    rows = [[title, *(_shown(each.get(name)) for each in measurements)] for name, title in ROWS.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def measured(root: Path) -> dict[str, Any]:
    """What the files of a checkout say."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "src").rglob("*.py"))]
    trees, lengths = [ast.parse(text) for text in texts], [len(text.splitlines()) for text in texts]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    sizes = sorted(_num_lines(function) for function in functions)
    findings = lint(root / "src")
    return {
        "commit": _output("git", "-C", str(root), "describe", "--always", "--dirty").strip(),
        "lines": sum(lengths),
        "modules": len(lengths),
        "median_file": statistics.median(lengths),
        "longest_file": max(lengths),
        "function_p90": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "longest_function": sizes[-1],
        "lint_per_1000": findings.total() / sum(lengths) * 1000,
        "lint": " ".join(f"{rule} {number}" for rule, number in findings.most_common()) or "none",
        "duplicate_pairs": duplicate_pairs(root / "src"),
        "equal_functions": equal_functions(functions),
        "words_per_sentence": statistics.mean(len(sentence.split()) for tree in trees for sentence in sentences(tree)),
        "readme_bytes": (root / "README.md").stat().st_size,
    }


def lint(folder: Path) -> Counter[str]:
    """Findings by rule: those of the table of anchors that the house is compared with, `noqa` or not."""
    limits = [word for limit in LIMITS for word in ("--config", limit)]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--exit-zero", "--no-cache"]
    found = _output(
        *command, "--target-version", "py310", "--select", RULES, *limits, "--output-format", "json", str(folder)
    )
    return Counter(finding["code"] for finding in json.loads(found))


def duplicate_pairs(folder: Path) -> int | None:
    """Pairs of places that share six lines or more; None without the command that counts them."""
    if shutil.which("duplicates") is None:
        return None
    first = _output("duplicates", "--repo", str(folder), "--seconds", "300", "--most", "1")
    number = re.match(r"(\d+) pair", first)
    return int(number[1]) if number else 0


def equal_functions(functions: list[Function]) -> int:
    """Pairs of functions of the same shape: the same code but for docstrings, names, strings and numbers."""
    shapes = Counter(
        re.sub(r"'[^']*'|\d+", "", "".join(map(ast.dump, function.body[ast.get_docstring(function) is not None :])))
        for function in functions
        if _num_lines(function) >= LEAST_EQUAL_LINES
    )
    return sum(math.comb(number, 2) for number in shapes.values())


def sentences(tree: ast.Module) -> Iterator[str]:
    """The sentences of all docstrings, without lists of arguments, errors and examples, tables and code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            doc = re.split(r"\n\s*(?:Args|Returns|Raises|Examples?|Yields)\b.*:\n", ast.get_docstring(node) or "")[0]
            for paragraph in re.sub(r"```.*?```", "", doc, flags=re.DOTALL).split("\n\n"):
                if not re.match(r"\s*[-|*]", paragraph):
                    yield from filter(str.strip, re.split(r"(?<=[.!?])\s+", paragraph))


def times(root: Path) -> dict[str, float]:
    """What importing and asking for help take: the least of several runs each, in turn, byte code written before."""
    script = re.search(
        r'^falcon-spec = "([\w.]+):main"', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert script is not None  # every commit of this repository has the command
    codes = [BASE_IMPORT, "import transformers_falcon_spec", f"from {script[1]} import main; main(['--help'])"]
    rounds = [[_seconds(code, root / "src") for code in codes] for _ in range(1 + NUM_RUNS)]
    base, own, shown = map(min, zip(*rounds[1:], strict=True))
    return {"import_seconds": own, "import_ratio": own / base, "help_seconds": shown}


def _seconds(code: str, source: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def _num_lines(function: Function) -> int:
    assert function.end_lineno is not None  # parsed from text
    return function.end_lineno - function.lineno + 1


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
