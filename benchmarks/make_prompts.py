"""Pick the prompts of the benchmarks, seeded, from the public evaluation sets and from the held-out part of the mix.

Command: python benchmarks/make_prompts.py --evaluation ../shared/data --held-out runs/data/held_out.jsonl
The files it writes lie in `benchmarks/prompts` and are what every figure was measured on. Test sets are never tuned on;
`held_out.jsonl` is what block size, tree and budget are chosen on.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "prompts"
NUM_PROMPTS = {"gsm8k": 70, "humaneval": 50, "mt_bench": 80, "held_out": 60}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    """Write the four files."""
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
    for name, prompts in sets.items():
        chosen = sorted(random.Random(0).sample(range(len(prompts)), NUM_PROMPTS[name]))
        lines = [json.dumps({"id": prompts[i][0], "prompt": prompts[i][1]}, ensure_ascii=False) for i in chosen]
        (OUTPUT / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(lines)} prompts -> {OUTPUT / name}.jsonl")


if __name__ == "__main__":
    main()
