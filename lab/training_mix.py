"""Builds the prompt mix from which the pair in `models/` learned: conversations of local files and of Python's standard library.

One shuffled JSON lines file, filtered against evaluation prompts, and a held-out file of the same kind that choices are made on. The
files that it reads lie outside of this repository (`--mix`, `--evaluation`); `--tiny` needs none and takes seconds.

Command: python -m lab.training_mix --mix ../shared/data/train --evaluation ../shared/data --output runs/data
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from examples.overlap import OverlapIndex

CHAT_SOURCES = ("self_instruct", "gpteacher", "vicuna", "arena", "open_assistant", "flan_cot/creak", "flan_cot/ecqa")
CODE_SOURCES = ("gpteacher_codegen", "mbpp")
SKIPPED_LIBRARY_PARTS = ("/test", "site-packages", "idlelib", "lib2to3", "turtledemo", "encodings")
PER_KIND = 4000  # most rows of math, code, chat and library each
HELD_OUT = 200  # rows kept for choosing, never for training
TINY_PER_KIND, TINY_HELD_OUT = 40, 8
MIN_LINES, MAX_LINES = 5, 39  # of a library function, below its first line
PROMPT_FIELDS = {"mt_bench": "turns", "humaneval": "prompt", "gsm8k_test": "question"}  # of each evaluation file

Conversation = list[dict[str, str]]


def library_conversations(limit: int) -> Iterator[Conversation]:
    """Signature and docstring as the question, function body as the answer, from the running Python's own library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    found = 0
    for path in (path for path in paths if not any(part in str(path) for part in SKIPPED_LIBRARY_PARTS)):
        for head, body in _documented_functions(path):
            if found == limit:
                return
            found += 1
            yield [
                {"role": "user", "content": "Complete the Python function.\n" + head},
                {"role": "assistant", "content": body},
            ]


def _documented_functions(path: Path) -> Iterator[tuple[str, str]]:
    try:
        source = path.read_text(encoding="utf-8")
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, UnicodeDecodeError):
        return

    lines = source.splitlines()
    for function in functions:
        size = function.end_lineno - function.lineno
        if ast.get_docstring(function) and len(function.body) > 1 and MIN_LINES <= size <= MAX_LINES:
            docstring_end = function.body[0].end_lineno
            head = textwrap.dedent("\n".join(lines[function.lineno - 1 : docstring_end]))
            indent = len(lines[function.lineno - 1]) - len(lines[function.lineno - 1].lstrip())
            body = "\n".join(line[indent:] for line in lines[docstring_end : function.end_lineno])
            yield head, body


def mix_conversations(folder: Path) -> Iterator[tuple[str, Conversation]]:
    """Kind and messages of the rows a small target can learn from: mathematics, code, assistant-style chat."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            for row in map(json.loads, lines):
                kind = _kind(path.name, row["source"])
                if kind:
                    yield kind, row["messages"]


def _kind(file_name: str, source: str) -> str | None:
    if file_name.startswith("math"):
        return "math"
    if file_name.startswith("code"):
        return "code" if source.startswith(CODE_SOURCES) else None
    return "chat" if file_name.startswith("chat") and any(part in source for part in CHAT_SOURCES) else None


def evaluation_prompts(folder: Path) -> Iterator[tuple[str, str]]:
    """Every evaluation prompt of MT-Bench, HumanEval and GSM8K test, and where it stands."""
    for name, field in PROMPT_FIELDS.items():
        path = folder / f"{name}.jsonl"
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, row in enumerate(map(json.loads, lines), start=1):
                texts = row[field] if isinstance(row[field], list) else [row[field]]
                yield from ((text, f"{path}, line {number}") for text in texts)


def build(args: argparse.Namespace) -> dict[str, list[Conversation]]:
    """The shuffled mix, by split."""
    num_per_kind = TINY_PER_KIND if args.tiny else PER_KIND
    num_held_out = TINY_HELD_OUT if args.tiny else HELD_OUT
    by_kind: dict[str, list[Conversation]] = {"library": list(library_conversations(num_per_kind))}
    forbidden = OverlapIndex([])
    if not args.tiny:
        forbidden = OverlapIndex(evaluation_prompts(args.evaluation))
        for kind, messages in mix_conversations(args.mix):
            by_kind.setdefault(kind, []).append(messages)

    generator = random.Random(args.seed)
    chosen = []
    for rows in by_kind.values():
        generator.shuffle(rows)
        chosen += rows[:num_per_kind]

    clean = []
    for row in chosen:
        if not any(forbidden.find(message["content"]) for message in row):
            clean.append(row)
    print(f"{len(chosen) - len(clean)} rows hold an evaluation prompt and are left out")
    generator.shuffle(clean)
    return {"held_out": clean[:num_held_out], "train": clean[num_held_out:]}


def main() -> None:
    """Write `train.jsonl` and `held_out.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", type=Path, default=Path("../shared/data/train"), help="folder of *.jsonl.gz files")
    parser.add_argument("--evaluation", type=Path, default=Path("../shared/data"), help="folder of evaluation prompts")
    parser.add_argument("--output", type=Path, default=Path("runs/data"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="standard library only, 40 rows: a trial without files")
    args = parser.parse_args()

    args.output.mkdir(parents=True, exist_ok=True)
    for split, rows in build(args).items():
        text = "".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows)
        (args.output / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        print(f"{len(rows)} rows -> {args.output / split}.jsonl")


if __name__ == "__main__":
    main()
