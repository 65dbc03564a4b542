"""EleutherAI's harness (lm_eval) with a drafter: a task evaluated with the target alone and with the drafter, texts and scores compared.

Needs the extra `harness`. Command: python examples/09_lm_eval.py
Hardware and time: two CPU cores, a minute with the models in `models/` and eight questions of GSM8K. `--task` takes a task of the harness, by name or as
a YAML file. `--tiny` makes random models and a question instead.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from pair import Pair, pair_options, read_pair
from scoring import exact_match

from transformers_falcon_spec import collect_speculation

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "gsm8k.jsonl"
TINY_ROWS = [{"question": "2 + 3?", "answer": "2 + 3 = 5 #### 5"}]


class DraftedLM(HFLM):
    """The harness's language model of Transformers, whose texts a drafter helps to write, if there is one."""

    def __init__(self, drafter: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.drafter, self.seconds = drafter, 0.0

    def _model_generate(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        texts = super()._model_generate(*args, assistant_model=self.drafter, **options)
        self.seconds += time.perf_counter() - start
        return texts


def questions(rows: list[dict[str, str]], max_new_tokens: int) -> dict[str, Any]:
    """A task of the harness: `rows` hold questions and solutions, of which the last number counts, and the likeness of the texts."""

    def score(row: dict[str, str], texts: list[str]) -> dict[str, Any]:
        right = exact_match(texts, [row["answer"]])["exact_match"]
        return {"exact_match": right, "chrf": (row["answer"], texts[0])}

    return {
        "task": "questions",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "process_results": score,
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
        "generation_kwargs": {"max_gen_toks": max_new_tokens, "do_sample": False},
    }


def evaluated(pair: Pair, drafter: Any, task: Any, manager: TaskManager, batch_size: int) -> tuple[Any, Any, float]:
    """Scores by task and metric, texts by task and document, and the seconds that writing them took."""
    lm = DraftedLM(drafter, pretrained=pair.target, tokenizer=pair.tokenizer, batch_size=batch_size)
    found = simple_evaluate(lm, tasks=[task], task_manager=manager, apply_chat_template=True, bootstrap_iters=0)
    scores = {
        f"{name} {metric}": value
        for name, row in found["results"].items()
        for metric, value in row.items()
        if isinstance(value, float)
    }
    texts = {
        (name, sample["doc_id"]): sample["resps"] for name, samples in found["samples"].items() for sample in samples
    }
    return scores, texts, lm.seconds


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = pair_options(__doc__)
    options.add_argument("--questions", type=Path, default=QUESTIONS, help="JSON lines with `question` and `answer`")
    options.add_argument("--task", help="instead of questions: a task of the harness, by name or as a YAML file")
    options.add_argument("--batch-size", type=int, default=1)
    options.add_argument("--max-new-tokens", type=int, default=200)
    return options


def main() -> None:
    """Evaluate twice, and compare."""
    args = parser().parse_args()
    pair = read_pair(args)
    rows = TINY_ROWS if args.tiny else [json.loads(line) for line in args.questions.read_text("utf-8").splitlines()]
    task = args.task or questions(rows, 16 if args.tiny else args.max_new_tokens)
    is_listed = args.task is not None and not Path(args.task).is_file()  # reading the harness's list takes a while
    manager = TaskManager(include_defaults=is_listed)
    found = {}
    for name, drafter in {"the target alone": None, "with the drafter": pair.drafter}.items():
        with collect_speculation() as calls:
            scores, texts, seconds = evaluated(pair, drafter, task, manager, args.batch_size)
        found[name] = (scores, texts)
        counts = ", ".join(f"{metric} {value:.3f}" for metric, value in scores.items())
        num_drafted, num_accepted = (
            sum(getattr(call, f"num_{what}") for call in calls) for what in ("drafted", "accepted")
        )
        print(f"{name}: {counts}; {seconds:.1f} s, {num_drafted} tokens drafted, {num_accepted} of them kept")
    alone, drafted = found.values()
    print("the same texts and scores" if alone == drafted else "other texts")


if __name__ == "__main__":
    main()
