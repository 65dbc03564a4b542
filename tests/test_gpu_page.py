"""`docs/gpu.md` says which families and drafters are not captured, and why: all of them, as tested."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.every_drafter import KINDS, every_drafter
from tests.families import DRAFTED, FAMILIES
from tests.generation.capture.test_texts import INELIGIBLE
from tests.tiny import make_target
from transformers_falcon_spec.drafters.registry import METHODS
from transformers_falcon_spec.generation.adapters import unwrapped

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
REFUSED = "`generate` refuses drafters for them, or drafts nothing"


def part(heading: str) -> str:
    """The text below a heading of the page."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n\n")[2].partition("\n#")[0].strip()


def families() -> str:
    """The part on families, as it must stand on the page: the others with the reason."""
    reasons: dict[str, list[str]] = {}
    for family in FAMILIES:
        reasons.setdefault(INELIGIBLE.get(family, "" if family in DRAFTED else REFUSED), []).append(family)
    eligible = reasons.pop("")
    rows = [f"| {_names(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(
        [
            f"{len(eligible)} of the {len(FAMILIES)} [families of targets](results.md#families-of-targets) can be captured.",
            "",
            "| the others | why not |",
            "|---|---|",
            *rows,
        ]
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_the_page_lists_every_other_family_with_the_reason() -> None:
    assert part("Families") == families()


def test_the_page_lists_every_drafter_with_the_reason() -> None:
    target, found = make_target(), {}
    for kind in KINDS:
        drafter: Any = every_drafter(kind, target)
        inner = unwrapped(drafter)
        inner.generation_config.capture = True
        notes = runs.drafted(target, drafter, max_new_tokens=4).speculation.notes
        reasons = [note.partition("captured: ")[2].rstrip(".") for note in notes]
        found[type(inner).__name__] = f"no: {reasons[0]}" if reasons else "yes"

    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", part("Drafters"), flags=re.MULTILINE))

    assert rows == found
    assert found.keys() >= {method.drafter.__name__ for method in METHODS.values()}
