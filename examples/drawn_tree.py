"""Draws the tree of a step as nested lists of HTML."""

from html import escape

from transformers_falcon_spec.evaluation.steps import ACCEPTED, BONUS, REJECTED, Step

# The page sets the colours `--dim`, `--line`, `--panel` and `--identical`.
STYLE = """
.tree, .tree ul { list-style: none; margin: 0; padding: 0; }
.tree li { display: flex; align-items: center; position: relative; padding: .1rem 0; }
.tree ul { margin-left: 2rem; }
.tree ul > li::before { content: ""; position: absolute; left: -1rem; width: 1rem; top: 50%; border-top: 1px solid var(--dim); }
.tree ul > li::after { content: ""; position: absolute; left: -1rem; top: 0; bottom: 0; border-left: 1px solid var(--dim); }
.tree ul > li:first-child::after { top: 50%; }
.tree ul > li:last-child::after { bottom: 50%; }
.tree ul > li:only-child::after { display: none; }
.tree ul { position: relative; }
.tree ul::before { content: ""; position: absolute; left: -2rem; width: 1rem; top: 50%; border-top: 1px solid var(--dim); }
.node { white-space: nowrap; border: 1px solid var(--line); border-radius: .3rem; padding: .05rem .4rem; background: var(--panel); }
.node code { white-space: pre; }
.left { color: var(--dim); }
.kept { border: 2px solid var(--identical); font-weight: 700; }
.bonus { border-style: dashed; }
"""


def render_tree(step: Step) -> str:
    """The tree of a step, for a page that has this style; a list of children stands behind its node."""
    children: list[list[int]] = [[] for _ in step.nodes]
    for number, node in enumerate(step.nodes[1:], start=1):
        children[node.parent].append(number)

    lines = []
    waiting: list[int | str] = [0]  # nodes, and what is written as it is
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            lines.append(each)
            continue

        below: list[int | str] = [*children[each]]
        if each == step.last_accepted and step.bonus is not None:
            below.append(f"<li>{_marked('bonus', BONUS, step.bonus)}</li>")
        lines.append(f"<li>{_node(step, each)}{'<ul>' if below else '</li>'}")
        if below:
            waiting.append("</ul></li>")
            waiting += reversed(below)

    return "\n".join(['<ul class="tree">', *lines, "</ul>"])


def _node(step: Step, number: int) -> str:
    node = step.nodes[number]
    if number == 0:
        return _marked("root", "", node.text, node.token_id)
    kind, mark = ("kept", ACCEPTED) if node.is_accepted else ("left", REJECTED)
    return _marked(kind, mark, node.text, node.token_id)


def _marked(kind: str, mark: str, text: str, token_id: int | None = None) -> str:
    shown = f"{mark} " if mark else ""
    title = "" if token_id is None else f' title="token id {token_id}"'
    return f'<span class="node {kind}"{title}>{shown}<bdi><code>{escape(text)}</code></bdi></span>'
