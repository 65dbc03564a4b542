"""The tree of a step as HTML: nested as the tree is, safe, and as deep as a chain may be."""

import re
from html import unescape

from drawn_tree import render_tree

from tests.evaluation.test_steps import a_step
from tests.pages import Outline
from transformers_falcon_spec.evaluation.steps import Step, StepNode

ATTACK = "<script>alert('x')</script>"


def test_lists_are_nested_as_the_tree_is() -> None:
    tree = render_tree(a_step())

    Outline(tree)  # every tag matches
    open_nodes: list[str] = []
    found = []
    for tag, text in re.findall(r"<(li|/li)>(?:<span[^>]*>(.*?)</span>)?", tree):
        if tag == "li":
            label = unescape(re.sub(r"<.*?>", "", text))
            found.append((open_nodes[-1] if open_nodes else None, label))
            open_nodes.append(label)
        else:
            open_nodes.pop()
    root, kept, deep = "'t0'", "✓ 't1'", "✓ 't3'"
    assert found == [
        (None, root),
        (root, kept),
        (kept, deep),
        (deep, "· 't5'"),
        (deep, "+ 'own'"),
        (kept, "· 't4'"),
        (root, "· 't2'"),
    ]


def test_what_a_model_says_is_escaped() -> None:
    step = Step((StepNode(-1, 1, repr(ATTACK), True),), num_lookahead=0, bonus=ATTACK)

    tree = render_tree(step)

    assert "<script" not in tree
    assert tree.count("&lt;script&gt;") == 2


def test_a_long_chain_is_drawn() -> None:
    nodes = tuple(StepNode(number - 1, 1, "'t'", is_accepted=False) for number in range(512))

    outline = Outline(render_tree(Step(nodes, 0, None)))

    assert [tag for tag, _ in outline.tags].count("li") == 512
