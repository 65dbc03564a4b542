"""Conversations of an agent: the ways to draft write the same texts, and a store makes what was asked before cheaper."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.returning_texts import ALONE, CONVERSATIONS, LOOKUP, REPORT, STOCK, STORE, Agent, rows_of
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.provenance import provenance

MODELS = Path(__file__).parents[2] / "models"


@torch.no_grad()
def test_all_ways_to_draft_write_the_texts_of_the_target_and_a_store_saves_steps_where_they_return() -> None:
    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    drafter = load_drafter(str(MODELS / "falcon-reference"), target)
    agent = Agent(target, tokenizer, drafter, "greedy", 24)

    rows = agent.do("What is 3 plus 4?", "a sum", 0)

    assert len(rows) == 4 * len(CONVERSATIONS)
    assert all(row["num_identical"] == 1 for row in rows if row["method"] != STOCK)

    def num_steps(method: str, kind: str) -> int:
        (found,) = (row["num_steps"] for row in rows if (row["method"], row["conversation"]) == (method, kind))
        return found

    assert num_steps(STORE, "write") == num_steps(LOOKUP, "write")  # nothing is kept yet
    assert num_steps(STORE, "retry") < num_steps(LOOKUP, "retry")
    assert num_steps(ALONE, "retry") == num_steps(ALONE, "write")


def test_rows_pool_tasks_and_the_page_shows_tokens_a_step() -> None:
    def record(task: str, method: str, kind: str, num_accepted: int) -> dict[str, Any]:
        counts = {"num_steps": 10, "num_accepted": num_accepted, "num_drafted": 40, "num_identical": 1}
        return {"task": task, "method": method, "conversation": kind, "decoding": "greedy", **counts}

    records = []
    for kind in CONVERSATIONS:
        records += [record("a", STORE, kind, 10), record("b", STORE, kind, 30)]

    rows = rows_of(records)
    text = REPORT.render({"provenance": provenance(seed=0), "rows": rows}, "returning_texts.json")

    assert [row["acceptance_length"] for row in rows] == [3.0] * 4
    assert rows[0]["interval"] == (2.0, 4.0)
    assert f"| {STORE} | 3.00 (2.00 to 4.00) | 3.00 (2.00 to 4.00) |" in text
    assert "8 of 8 texts are those of the target alone." in text
