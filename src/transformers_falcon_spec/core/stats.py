"""Counts what a generation did, and derives rates from the counts. Acceptance is defined here and nowhere else."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class GenerationStats:
    """Counts and seconds of one or more generations; add two with `+`.

    A step is one round of propose, read, accept, emit and trim of one row; the prefill is none. In a batch the rows'
    counts stand in `rows` as well; passes and seconds are the batch's.

    Example:

    ```python
    >>> stats = GenerationStats()
    >>> stats.record(num_nodes=4, max_depth=3, num_accepted=0)
    >>> stats.record(num_nodes=4, max_depth=3, num_accepted=2)
    >>> stats.acceptance_length, stats.acceptance_histogram, stats.acceptance_by_depth
    (2.0, {0: 1, 2: 1}, [0.5, 1.0, 0.0])

    ```
    """

    num_steps: int = 0  # of all rows
    num_drafted: int = 0  # nodes sent to the target, roots excluded
    num_accepted: int = 0  # draft tokens that were kept, without root and bonus token
    num_passes: int = 0  # drafter passes
    num_tokens: int = 0  # committed, those of the prefill included
    offered_by_depth: list[int] = field(default_factory=list)  # steps that kept depth d - 1 and had a node at depth d
    kept_by_depth: list[int] = field(default_factory=list)  # steps that kept depth d
    acceptance_histogram: dict[int, int] = field(default_factory=dict)  # steps per `num_accepted`
    prefill_seconds: float = 0.0  # reading the prompt
    draft_seconds: float = 0.0  # the drafter's
    verify_seconds: float = 0.0  # reading drafts, and choosing tokens where the device does
    total_seconds: float = 0.0  # of the whole call
    # memory of weights that are packed for reads of several tokens; of several calls the largest
    packed_bytes: int = 0
    notes: list[str] = field(default_factory=list)  # what differs from the usual: chain fallback, feature source
    rows: list["GenerationStats"] = field(default_factory=list)  # of each row, where there are several
    tuning: dict[str, Any] = field(default_factory=dict)  # what the tuner chose, and why; of one call alone

    def record(self, *, num_nodes: int, max_depth: int, num_accepted: int, row: int = 0) -> None:
        """Count one step of a row; `num_nodes` includes the root."""
        for stats in (self, *self.rows[row : row + 1]):
            stats.num_steps += 1
            stats.num_drafted += num_nodes - 1
            stats.num_accepted += num_accepted
            stats.acceptance_histogram[num_accepted] = stats.acceptance_histogram.get(num_accepted, 0) + 1
            missing = max_depth - len(stats.offered_by_depth)
            stats.offered_by_depth += [0] * missing
            stats.kept_by_depth += [0] * missing
            for depth in range(min(num_accepted + 1, max_depth)):
                stats.offered_by_depth[depth] += 1
                stats.kept_by_depth[depth] += depth < num_accepted

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add to the seconds of a phase, `"draft"` for `draft_seconds` and so on."""
        name = f"{phase}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def count_tokens(self, num_tokens: Sequence[int]) -> None:
        """Note how many tokens each row committed in all."""
        self.num_tokens = sum(num_tokens)
        for row, num in zip(self.rows, num_tokens, strict=False):
            row.num_tokens = num

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per step: 1 + accepted / steps, the bonus token included."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps that kept depth d among those that kept depth d - 1; first entry: depth 1."""
        pairs = zip(self.kept_by_depth, self.offered_by_depth, strict=True)
        return [kept / offered if offered else 0.0 for kept, offered in pairs]

    @property
    def joint_acceptance_by_depth(self) -> list[float]:
        """Share of all steps that kept depth d; first entry: depth 1."""
        return [kept / self.num_steps for kept in self.kept_by_depth]

    @property
    def other_seconds(self) -> float:
        """What is neither prefill, drafting nor the target's tree forward: the loop's own cost."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second, prefill included."""
        return self.num_tokens / self.total_seconds if self.total_seconds else 0.0

    def __add__(self, other: "GenerationStats") -> "GenerationStats":
        """Counts and seconds of both."""
        total = GenerationStats()
        for name, value in vars(total).items():
            if isinstance(value, int | float):
                setattr(total, name, getattr(self, name) + getattr(other, name))
            elif name.endswith("_by_depth"):
                pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
                setattr(total, name, [left + right for left, right in pairs])

        histogram = Counter(self.acceptance_histogram) + Counter(other.acceptance_histogram)
        total.acceptance_histogram = dict(sorted(histogram.items()))
        total.packed_bytes = max(self.packed_bytes, other.packed_bytes)  # the same copies
        total.notes = list(dict.fromkeys(self.notes + other.notes))
        total.rows = self.rows + other.rows
        return total

    def __str__(self) -> str:
        """What to look at first, in a few lines: tokens a step, what is kept by depth, seconds by phase, notes."""
        of_rows = f" of {len(self.rows)} rows" if self.rows else ""
        num_drafted = self.num_drafted / self.num_steps if self.num_steps else 0.0
        by_depth = " ".join(f"{share:.2f}" for share in self.acceptance_by_depth) or "-"
        lines = [
            f"{self.acceptance_length:.2f} tokens a step: {self.num_tokens} tokens{of_rows} in {self.num_steps} steps",
            f"{self.acceptance_length - 1:.2f} of {num_drafted:.2f} drafted tokens are kept a step",
            f"kept by depth, of those whose parent was kept: {by_depth}",
        ]
        if self.total_seconds:
            phases = ("prefill", "draft", "verify", "other")
            parts = ", ".join(f"{phase} {getattr(self, f'{phase}_seconds'):.2f}" for phase in phases)
            lines.append(f"{self.total_seconds:.2f} s, {self.tokens_per_second:.1f} tokens a second: {parts}")

        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Counts, seconds and the rates derived from them."""
        names = ("acceptance_length", "acceptance_by_depth", "joint_acceptance_by_depth")
        rates = {name: getattr(self, name) for name in (*names, "other_seconds", "tokens_per_second")}
        return {**vars(self), "rows": [row.to_json() for row in self.rows], **rates}
