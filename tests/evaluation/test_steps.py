"""Steps of a text in the terminal."""

import io
from typing import Any

import torch
from rich.console import Console

from transformers_falcon_spec import Draft
from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.evaluation.steps import StepLog


class Words:
    """A tokenizer whose token n is `tn`, but 99, which would control the terminal."""

    def decode(self, token_ids: list[int]) -> str:
        (token_id,) = token_ids
        return "\x1b[2J[bold]\n" if token_id == 99 else f"t{token_id}"


def printed(parents: list[int], path: AcceptedPath, first: int = 0, **fields: Any) -> list[str]:
    """The lines of the second of two equal steps, whose node n holds token `first` + n."""
    tokenizer: Any = Words()
    log = StepLog(tokenizer)
    draft = Draft(torch.arange(first, first + len(parents))[None], torch.tensor([parents]), **fields)
    for _ in range(2):
        log(draft, [path])
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(log.steps[1])
    return console.file.getvalue().rstrip("\n").split("\n")


def test_the_terminal_marks_what_was_kept_without_colour() -> None:
    probs = torch.tensor([[1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.0]])

    lines = printed(
        [-1, 0, 0, 1, 1, 3, -1], AcceptedPath((0, 1, 3), (1, 3, 7)), node_probs=probs
    )  # the last: a filler

    assert lines == [
        "Step 2: 2 of 5 drafted nodes kept",
        "'t0'",
        "├── ✓ 't1' 0.10",
        "│   ├── ✓ 't3' 0.30",
        "│   │   ├── · 't5' 0.50",
        "│   │   └── + 't7' the target's own",
        "│   └── · 't4' 0.40",
        "└── · 't2' 0.20",
    ]


def test_lookahead_nodes_are_counted_and_not_shown_and_a_step_may_keep_nothing() -> None:
    is_lookahead = torch.tensor([[False, True, False, True]])

    lines = printed([-1, 0, 0, 1], AcceptedPath((), ()), is_lookahead=is_lookahead)

    assert lines == ["Step 2: 0 of 1 drafted nodes kept (2 lookahead nodes were read, too)", "'t0'", "└── · 't2'"]


def test_tokens_cannot_write_to_the_terminal() -> None:
    lines = printed([-1], AcceptedPath((0,), ()), first=99)

    assert lines == ["Step 2: 0 of 0 drafted nodes kept", r"'\x1b[2J[bold]\n'"]
