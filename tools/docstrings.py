"""Reads the docstrings of the package for the API reference: the Hugging Face form becomes what mkdocstrings renders.

An extension of griffe, named in `mkdocs.yml`. Types lose the marks that would show, and names in square brackets become links
where the reference has them.
"""

import re
from collections.abc import Iterator

from griffe import Alias, Class, Extension, Function, Module, Object

ARGUMENT = re.compile(r"^( +\w+) \((.+)\):(?= |$)", re.MULTILINE)
OUTCOME = re.compile(r"^( +)\[`([\w.]+)`\]:", re.MULTILINE)
NAME = re.compile(r"\[`~?([\w.]+)`\]")


class HuggingFaceDocstrings(Extension):
    """Rewrites every docstring of a package before it is parsed."""

    def on_package(self, *, pkg: Module, **_: object) -> None:
        """What griffe calls when a package is read."""
        for item in _objects(pkg):
            if item.docstring:
                public = frozenset(map(str, pkg.exports or ()))
                is_function = isinstance(item, Function)  # its signature tells the defaults
                item.docstring.value = rewrite(item.docstring.value, pkg.path, public, is_function)


def rewrite(text: str, package: str, public: frozenset[str], has_defaults: bool) -> str:
    """A docstring in the form that griffe calls Google's, with links to the `public` names of `package`."""
    text = ARGUMENT.sub(lambda found: f"{found[1]} ({_plain(found[2], has_defaults)}):", text)
    text = OUTCOME.sub(r"\1\2:", text)

    def link(found: re.Match[str]) -> str:
        first, last = found[1].partition(".")[0], found[1].rpartition(".")[2]
        return f"[`{found[1]}`][{package}.{found[1]}]" if first in public else f"`{last}`"

    return NAME.sub(link, text)


def _plain(annotation: str, has_defaults: bool) -> str:
    """A type without marks of Markdown, and without a default that is shown beside it."""
    annotation = NAME.sub(r"\1", annotation).replace("`", "")
    if has_defaults:
        annotation = re.sub(r", \*optional\*, defaults to .*$", "", annotation)
    return re.sub(r", \*optional\*$", " or None", annotation).replace("*optional*", "optional")


def _objects(parent: Object) -> Iterator[Object]:
    """An object and all that it holds."""
    yield parent
    for member in parent.members.values():
        if not isinstance(member, Alias):
            if isinstance(member, (Class, Module)):
                yield from _objects(member)
            else:
                yield member
