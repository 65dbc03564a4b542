"""Scores: the answers of a target to GSM8K questions with a drafter and without, which score alike because they are the same.

Command: python examples/08_score_texts.py
Hardware and time: two CPU cores, about half a minute with the models in `models/`. `scoring.py` scores programs for HumanEval as well; it runs
them in the sandbox of `sandbox.py`. `--tiny` makes random models instead.
"""

import json
from pathlib import Path

from pair import pair_options, read_pair
from scoring import exact_match

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "gsm8k.jsonl"
TINY_ROWS = [{"question": "2 + 3?", "answer": "#### 5"}]


def main() -> None:
    """Answer every question twice, and score both texts."""
    parser = pair_options(__doc__)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="JSON lines with `question` and `answer`")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args()
    if args.tiny:
        args.max_new_tokens = 16
    pair = read_pair(args)
    rows = TINY_ROWS if args.tiny else [json.loads(line) for line in args.questions.read_text("utf-8").splitlines()]
    texts: dict[str, list[str]] = {"with the drafter": [], "the target alone": []}
    for row in rows:
        ids = pair.input_ids(row["question"]).to(pair.target.device)
        for name, assistant in zip(texts, (pair.drafter, None), strict=True):
            out = pair.target.generate(
                ids, assistant_model=assistant, max_new_tokens=args.max_new_tokens, do_sample=False
            )
            texts[name].append(pair.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    for name, answers in texts.items():
        found = exact_match(answers, [row["answer"] for row in rows])
        low, high = found["exact_match_interval"]
        print(f"{name}: {found['num_correct']} of {found['num_answers']} right ({low:.0%} to {high:.0%})")
    drafted, alone = texts.values()
    print("the same texts" if drafted == alone else "other texts")


if __name__ == "__main__":
    main()
