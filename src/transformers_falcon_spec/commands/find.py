"""`falcon-spec find`: list the drafters that people published on the Hub for a target.

The card of a drafter names its target as `base_model`. Acceptance lengths are those on the card, from the lowest to
the highest set of prompts, for each decoding. Whether a drafter fits a loaded target is checked when it is used, and
by `falcon-spec doctor`.

Example:
  falcon-spec find --target Qwen/Qwen3-0.6B
"""

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from ..hub.find import PublishedDrafter, find_drafters
from .options import option


@dataclass(kw_only=True)
class FindCommand:
    """The target, and the form of the output."""

    target: str = option("Name of the target on the Hub.")
    json: bool = option("Print JSON instead of a table.", False)


def run(command: FindCommand) -> None:
    """Search the Hub, and print the drafters."""
    found = find_drafters(command.target)
    if command.json:
        print(json.dumps([asdict(drafter) for drafter in found], indent=1))
        return
    if not found:
        print(f"No drafter on the Hub names `{command.target}` as its base model. Train one: `falcon-spec train`.")
        return
    table = Table("drafter", "method", "downloads", "acceptance length")
    for drafter in found:
        table.add_row(drafter.repo_id, drafter.method, str(drafter.downloads), _lengths(drafter))
    Console().print(table)


def _lengths(drafter: PublishedDrafter) -> str:
    """Format the acceptance lengths, one line for each decoding, for those of sampling and greedy text differ."""
    lines = []
    for decoding, lengths in drafter.acceptance.items():
        ends = dict.fromkeys((f"{min(lengths):.2f}", f"{max(lengths):.2f}"))
        lines.append(f"{' to '.join(ends)}, {decoding or 'decoding not said'}")
    return "\n".join(lines) or "-"
