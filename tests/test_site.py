"""The built documentation, as `make docs` leaves it in `site/`."""

import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import transformers_falcon_spec
from transformers_falcon_spec import FalconSpecConfig, SpeculationConfig
from transformers_falcon_spec.drafters.config_fields import PairConfig

pytestmark = pytest.mark.site
SITE = Path(__file__).parents[1] / "site"


class Page(HTMLParser):
    """The ids of a page, what it loads, and its words."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.feed((SITE / name).read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        if tag in {"img", "script"} or (tag == "link" and found.get("rel") == "stylesheet"):
            self.loads.append(found.get("src") or found.get("href") or "")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def reference() -> Page:
    return Page("reference/index.html")


def test_the_reference_has_an_entry_for_every_public_name(reference: Page) -> None:
    errors = {name: f"errors.{name}" for name in transformers_falcon_spec.__all__ if name.endswith("Error")}

    names = {f"transformers_falcon_spec.{errors.get(name, name)}" for name in transformers_falcon_spec.__all__}

    assert names - reference.ids == set()


def test_the_reference_lists_every_argument(reference: Page) -> None:
    names = []
    for config in (SpeculationConfig, FalconSpecConfig, PairConfig):
        names += re.findall(r"^    (\w+) \(`", inspect.getdoc(config) or "", flags=re.MULTILINE)

    listed = re.findall(r"^(\w+)\n?\s*\(", re.sub(r"\n\s*", "\n", reference.text), flags=re.MULTILINE)

    assert len(names) > 20
    assert set(names) - set(listed) == set()


def test_fields_have_the_comments_and_the_help_beside_them(reference: Page) -> None:
    assert "Nodes sent to the target, roots excluded." in reference.text  # a comment of `GenerationStats`
    help_text = "Nodes, root included, of the tree fitted to the evaluation data after training; 0 keeps the tree of the drafter's config."
    assert help_text in reference.text
    assert "field(" not in reference.text


def test_no_mark_of_a_docstring_is_left(reference: Page) -> None:
    assert [mark for mark in ("[`", "*optional*", "Args:", "```") if mark in reference.text] == []
    assert ">>> SpeculationConfig(draft_tree=" in reference.text


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in SITE.rglob("index.html"):
        page = Page(str(path.relative_to(SITE)))

        assert page.loads
        assert [link for link in page.loads if re.match(r"(https?:)?//", link)] == []
        assert [link for link in page.loads if not (path.parent / link.partition("?")[0]).exists()] == []


def test_the_figures_are_shown() -> None:
    shown = [Path(link).name for link in Page("how_it_works/index.html").loads]

    assert {"walk.svg", "tree_mask.svg", "block.svg"} <= set(shown)
