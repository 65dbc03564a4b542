"""Steps of a text: the log, and the terminal."""

import io

import torch
from rich.console import Console

from tests.chat import make_tokenizer
from transformers_falcon_spec import Draft
from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.evaluation.steps import (
    Step,
    StepLog,
    StepNode,
    step_text,
)

PARENTS = [-1, 0, 0, 1, 1, 3]


def a_step(bonus: str | None = "'own'") -> Step:
    """A tree whose nodes 1 and 3 are kept."""
    nodes = [
        StepNode(parent, 10 + number, f"'t{number}'", number in (0, 1, 3)) for number, parent in enumerate(PARENTS)
    ]
    return Step(tuple(nodes), num_lookahead=0, bonus=bonus)


def printed(step: Step) -> list[str]:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(step_text(3, step))
    return console.file.getvalue().rstrip("\n").split("\n")


def test_the_log_keeps_nodes_and_what_became_text() -> None:
    tokenizer = make_tokenizer()
    one, two, three = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("a", "b", "c"))
    log = StepLog(tokenizer)
    draft = Draft(
        torch.tensor([[one, two, three, one, 7]]),
        torch.tensor([[-1, 0, 0, 1, -1]]),  # the last one is a filler
    )

    log(draft, [AcceptedPath((0, 2), (three, two))])

    (step,) = log.steps
    assert [(node.parent, node.text, node.is_accepted) for node in step.nodes] == [
        (-1, "'a'", True),
        (0, "'b'", False),
        (0, "'c'", True),
        (1, "'a'", False),
    ]
    assert (step.num_drafted, step.num_accepted, step.last_accepted, step.bonus) == (3, 1, 2, "'b'")


def test_lookahead_nodes_are_counted_and_not_shown_and_a_step_may_keep_nothing() -> None:
    log = StepLog(make_tokenizer())
    is_lookahead = torch.tensor([[False, True, False, True]])

    log(
        Draft(torch.tensor([[7, 8, 9, 10]]), torch.tensor([[-1, 0, 0, 1]]), is_lookahead=is_lookahead),
        [AcceptedPath((), ())],
    )

    (step,) = log.steps
    assert [(node.parent, node.token_id, node.is_accepted) for node in step.nodes] == [
        (-1, 7, False),
        (0, 9, False),
    ]
    assert (step.num_lookahead, step.num_accepted, step.last_accepted, step.bonus) == (2, 0, 0, None)


def test_the_terminal_marks_what_was_kept_without_colour() -> None:
    assert printed(a_step()) == [
        "Step 3: 2 of 5 drafted nodes kept",
        "'t0'",
        "├── ✓ 't1'",
        "│   ├── ✓ 't3'",
        "│   │   ├── · 't5'",
        "│   │   └── + 'own' the target's own",
        "│   └── · 't4'",
        "└── · 't2'",
    ]


def test_tokens_cannot_write_to_the_terminal() -> None:
    node = StepNode(-1, 1, repr("\x1b[2J[bold]\n"), True)

    lines = printed(Step((node,), num_lookahead=4, bonus=None))

    assert lines == ["Step 3: 0 of 0 drafted nodes kept (4 lookahead nodes were read, too)", r"'\x1b[2J[bold]\n'"]
