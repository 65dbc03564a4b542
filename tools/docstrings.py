"""Reads the docstrings of the package for the API reference: the Hugging Face form becomes what mkdocstrings renders.

An extension of griffe, named in `mkdocs.yml`. Types lose the marks that would show, names in square brackets become links
where the reference has them, and fields of dataclasses are documented by the comment beside them, or by their help.
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator

from griffe import Alias, Attribute, Class, Docstring, ExprCall, ExprKeyword, Extension, Function, Module, Object

ARGUMENT = re.compile(r"^( +\w+) \((.+)\):(?= |$)", re.MULTILINE)
OUTCOME = re.compile(r"^( +)\[`([\w.]+)`\]:", re.MULTILINE)
NAME = re.compile(r"\[`~?([\w.]+)`\]")


class HuggingFaceDocstrings(Extension):
    """Rewrites every docstring of a package before it is parsed."""

    def on_package(self, *, pkg: Module, **_: object) -> None:
        """What griffe calls when a package is read."""
        for item in _objects(pkg):
            if isinstance(item, Attribute) and isinstance(item.parent, Class):
                document_field(item)
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


def document_field(field: Attribute) -> None:
    """Give a field of a class its words, and of `field(...)` or `option(...)` keep the default alone."""
    field.labels -= {"class-attribute", "instance-attribute"}
    words = "" if field.docstring or field.lineno is None else field_words(field)
    if words:
        field.docstring = Docstring(f"{words[0].upper()}{words[1:].removesuffix('.')}.", parent=field)
    if isinstance(field.value, ExprCall) and str(field.value.function) in {"field", "option"}:
        arguments = field.value.arguments
        given = {part.name: part.value for part in arguments if isinstance(part, ExprKeyword)}
        first = [part for part in arguments if not isinstance(part, ExprKeyword)]
        field.value = first[0] if first else given.get("default")


def field_words(field: Attribute) -> str:
    """What is said of a field: in its `help`, or in the comments on its lines."""
    source = textwrap.dedent("\n".join(field.lines))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help":
            return _words(node.value)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "help":
                    return _words(value)

    tokens = tokenize.generate_tokens(io.StringIO(source + "\n").readline)
    return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def _words(text: ast.expr) -> str:
    """A piece of text as it is written; names in it stay names."""
    match text:
        case ast.Constant():
            return str(text.value)
        case ast.JoinedStr():
            return "".join(map(_words, text.values))
        case ast.FormattedValue():
            return _words(text.value)
    return f"`{ast.unparse(text)}`"


def _plain(annotation: str, has_defaults: bool) -> str:
    """A type without marks of Markdown, and without a default that is shown beside it."""
    annotation = NAME.sub(r"\1", annotation).replace("`", "")
    if has_defaults:
        return re.sub(r", \*optional\*.*$", "", annotation)
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
