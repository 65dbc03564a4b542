"""Pick the prompts of the benchmarks, seeded, from the public evaluation sets and from the held-out part of the mix.

Command: python benchmarks/make_prompts.py --evaluation ../shared/data --held-out runs/data/held_out.jsonl
The files it writes lie in `benchmarks/prompts` and are what every figure was measured on. Test sets are never tuned on;
`held_out.jsonl` is what block size, tree and budget are chosen on. `unlike.jsonl` is written by hand: text unlike the training mix.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "prompts"
NUM_PROMPTS = {"gsm8k": 70, "humaneval": 50, "mt_bench": 80, "held_out": 60}
NUM_PARITY_PROMPTS = 300  # on top of the test sets, for the check that texts are the same


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluation", type=Path, required=True, help="folder with the public sets")
    parser.add_argument("--held-out", type=Path, required=True, help="held-out conversations of the training mix")
    args = parser.parse_args()
    gsm8k = _rows(args.evaluation / "gsm8k_test.jsonl")
    sets = {
        "gsm8k": [(f"gsm8k_test/{place}", row["question"]) for place, row in enumerate(gsm8k)],
        "humaneval": [
            (row["task_id"], "Complete the Python function.\n" + row["prompt"].strip())
            for row in _rows(args.evaluation / "humaneval.jsonl")
        ],
        "mt_bench": [
            (f"mt_bench/{r['question_id']}", r["turns"][0]) for r in _rows(args.evaluation / "mt_bench.jsonl")
        ],
        "held_out": [(f"held_out/{i}", row["messages"][0]["content"]) for i, row in enumerate(_rows(args.held_out))],
    }
    OUTPUT.mkdir(exist_ok=True)
    chosen = {name: _sample(prompts, NUM_PROMPTS[name]) for name, prompts in sets.items()}
    left = [prompt for name in ("gsm8k", "humaneval") for prompt in sets[name] if prompt not in chosen[name]]
    for name, prompts in {**chosen, "parity": _sample(left, NUM_PARITY_PROMPTS)}.items():
        lines = [json.dumps({"id": prompt_id, "prompt": text}, ensure_ascii=False) for prompt_id, text in prompts]
        (OUTPUT / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(lines)} prompts -> {OUTPUT / name}.jsonl")


def _sample(prompts: list[tuple[str, str]], num: int) -> list[tuple[str, str]]:
    """Some of them, in their order."""
    return [prompts[place] for place in sorted(random.Random(0).sample(range(len(prompts)), num))]


if __name__ == "__main__":
    main()
