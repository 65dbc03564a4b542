"""Steps of a text: the log, the terminal, and a page that is complete, safe and readable without scripts."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.chat import make_tokenizer
from tests.evaluation.opening import seen_in_a_browser
from tests.pages import Outline
from transformers_falcon_spec import Draft
from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.evaluation.steps import (
    ObservedText,
    Step,
    StepLog,
    StepNode,
    render_step_page,
    render_tree,
    step_text,
    tree_style,
)
from transformers_falcon_spec.provenance import provenance

ATTACK = "<script>alert('x')</script>"
PARENTS = [-1, 0, 0, 1, 1, 3]


def a_step(bonus: str | None = "'own'") -> Step:
    """A tree whose nodes 1 and 3 are kept."""
    nodes = [
        StepNode(parent, 10 + number, f"'t{number}'", None if number == 0 else number / 10, number in (0, 1, 3))
        for number, parent in enumerate(PARENTS)
    ]
    return Step(tuple(nodes), num_lookahead=0, bonus=bonus)


def printed(step: Step) -> list[str]:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(step_text(3, step))
    return console.file.getvalue().rstrip("\n").split("\n")


def a_page(texts: list[ObservedText]) -> str:
    return render_step_page(texts, provenance(seed=0, dtype="float32"))


def test_the_log_keeps_nodes_probabilities_and_what_became_text() -> None:
    tokenizer = make_tokenizer()
    one, two, three = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("a", "b", "c"))
    log = StepLog(tokenizer)
    draft = Draft(
        torch.tensor([[one, two, three, one, 7]]),
        torch.tensor([[-1, 0, 0, 1, -1]]),  # the last one is a filler
        node_probs=torch.tensor([[1.0, 0.5, 0.25, 0.125, 0.0]]),
    )

    log(draft, [AcceptedPath((0, 2), (three, two))])

    (step,) = log.steps
    assert [(node.parent, node.text, node.prob, node.is_accepted) for node in step.nodes] == [
        (-1, "'a'", None, True),
        (0, "'b'", 0.5, False),
        (0, "'c'", 0.25, True),
        (1, "'a'", 0.125, False),
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
    assert [(node.parent, node.token_id, node.prob, node.is_accepted) for node in step.nodes] == [
        (-1, 7, None, False),
        (0, 9, None, False),
    ]
    assert (step.num_lookahead, step.num_accepted, step.last_accepted, step.bonus) == (2, 0, 0, None)


def test_the_terminal_marks_what_was_kept_without_colour() -> None:
    assert printed(a_step()) == [
        "Step 3: 2 of 5 drafted nodes kept",
        "'t0'",
        "├── ✓ 't1' 0.10",
        "│   ├── ✓ 't3' 0.30",
        "│   │   ├── · 't5' 0.50",
        "│   │   └── + 'own' the target's own",
        "│   └── · 't4' 0.40",
        "└── · 't2' 0.20",
    ]


def test_tokens_cannot_write_to_the_terminal() -> None:
    node = StepNode(-1, 1, repr("\x1b[2J[bold]\n"), None, True)

    lines = printed(Step((node,), num_lookahead=4, bonus=None))

    assert lines == ["Step 3: 0 of 0 drafted nodes kept (4 lookahead nodes were read, too)", r"'\x1b[2J[bold]\n'"]


def test_the_page_nests_nodes_as_the_tree_does() -> None:
    page = a_page([ObservedText("p", "t", [a_step()])])

    Outline(page)  # every tag matches
    tree = re.search(r'<ul class="tree">(.*?)\n</ul>', page, re.DOTALL).group(1)
    open_nodes: list[str] = []
    found = []
    for tag, text in re.findall(r"<(li|/li)>(?:<span[^>]*>(.*?)</span>)?", tree):
        if tag == "li":
            label = re.sub(r"<.*?>", "", text)
            found.append((open_nodes[-1] if open_nodes else None, label))
            open_nodes.append(label)
        else:
            open_nodes.pop()
    root, kept, deep = "&#39;t0&#39;", "✓ &#39;t1&#39; 0.10", "✓ &#39;t3&#39; 0.30"
    assert found == [
        (None, root),
        (root, kept),
        (kept, deep),
        (deep, "· &#39;t5&#39; 0.50"),
        (deep, "+ &#39;own&#39;"),
        (kept, "· &#39;t4&#39; 0.40"),
        (root, "· &#39;t2&#39; 0.20"),
    ]


def test_a_tree_alone_is_that_of_the_page_and_has_its_style() -> None:
    page = a_page([ObservedText("p", "t", [a_step()])])

    assert render_tree(a_step()).strip() in page
    assert tree_style().strip() in page
    assert "&lt;script" in render_tree(Step((StepNode(-1, 1, ATTACK, None, True),), num_lookahead=0, bonus=None))


def test_the_page_leads_from_step_to_step_and_needs_nothing_else() -> None:
    outline = Outline(a_page([ObservedText("p", "t", [a_step(), a_step(None)]), ObservedText("q", "u", [a_step()])]))

    ids = {attributes["id"] for _, attributes in outline.tags if "id" in attributes}
    links = [attributes["href"] for tag, attributes in outline.tags if tag == "a"]
    assert len(links) == 5  # a list of steps for each text, and between the two of the first
    assert all(link.removeprefix("#") in ids for link in links)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in outline.tags}
    assert "3 steps, acceptance length 3.00" in outline.text
    named = [attributes.get("aria-labelledby") for _, attributes in outline.tags]
    assert set(filter(None, named)) <= ids


def test_what_models_and_prompts_say_is_escaped() -> None:
    step = Step((StepNode(-1, 1, repr(ATTACK), None, True),), num_lookahead=0, bonus=ATTACK)

    page = a_page([ObservedText(ATTACK, ATTACK, [step])])

    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 4


def test_a_long_chain_is_shown() -> None:
    nodes = tuple(StepNode(number - 1, 1, "'t'", 0.5, is_accepted=False) for number in range(512))

    outline = Outline(a_page([ObservedText("p", "t", [Step(nodes, 0, None)])]))

    assert [tag for tag, _ in outline.tags].count("li") == 512 + 1


@pytest.mark.browser
@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(width: int, scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.html"
    path.write_text(a_page([ObservedText("p", "word " * 99, [a_step(), a_step()])]), encoding="utf-8")

    seen = seen_in_a_browser(path, width, scheme)

    assert seen["console"] == []
    assert seen["requests"] == [path.as_uri()]
    assert seen["page_width"] <= seen["width"]
    assert seen["beyond"] == []
    assert seen["focusable"] == 2
    assert (seen["page_color"] == "rgb(255, 255, 255)") == (scheme == "light")
    nodes = {node["text"]: node for node in seen["nodes"][: len(PARENTS) + 1]}
    assert len(nodes) == len(PARENTS) + 1
    assert json.dumps(nodes["✓ 't1' 0.10"]["border"]) != json.dumps(nodes["· 't2' 0.20"]["border"])
    lefts = [nodes[text]["left"] for text in ("'t0'", "✓ 't1' 0.10", "✓ 't3' 0.30", "+ 'own'")]
    assert lefts == sorted(set(lefts))  # deeper nodes stand further right
