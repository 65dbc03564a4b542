"""Renders HTML pages from templates: files that need no others, with the text of models and prompts escaped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"
DASH = "\N{EN DASH}"  # stands for what was not measured


def render(template: str, context: Mapping[str, Any]) -> str:
    """Fill a template of `templates/`, and return the page."""
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), **options)
    environment.filters |= _NUMBERS
    return environment.get_template(template).render(context)


def _written(form: str, factor: float = 1) -> Any:
    """A filter that writes a number in one form, and a dash for None."""
    return lambda value: DASH if value is None else form.format(factor * value)


_NUMBERS = {
    "fixed": _written("{:.2f}"),
    "times": _written("{:.2f}x"),
    "percent": _written("{:.1f} %", 100),
    "milliseconds": _written("{:.1f}", 1000),
    "mebibytes": _written("{:.1f}", 2**-20),
}
