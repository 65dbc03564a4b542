"""What the doctor can say: verdicts by name, and the report that they stand in."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ...drafters.compatibility.mismatches import OTHER_DTYPE, OTHER_TARGET, QUANTISED, WRONG_TEMPLATE, Mismatch

TRUNCATED = "truncated weights"
BROKEN = "broken checkpoint"
MASK_BUG = "mask bug"
NO_TREES = "no trees"
TEMPLATE_MASK = "template mask"
LOW_ACCEPTANCE = "low acceptance"
SLOW_MACHINE = "slow machine"
NAMES = (  # each has a section in docs/troubleshooting.md
    *(TRUNCATED, BROKEN, OTHER_TARGET, QUANTISED, OTHER_DTYPE, WRONG_TEMPLATE, TEMPLATE_MASK, MASK_BUG, NO_TREES),
    *(LOW_ACCEPTANCE, SLOW_MACHINE),
)
PAGE = "docs/troubleshooting.md"

Section = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One thing that is wrong.

    Args:
        name (`str`): One of `NAMES`.
        text (`str`): What was found, and what it costs.
        remedy (`str`): What to do.
    """

    name: str
    text: str
    remedy: str

    @classmethod
    def of(cls, mismatch: Mismatch) -> "Verdict":
        """The verdict that a mismatch with the contract stands for."""
        return cls(mismatch.name, mismatch.text, mismatch.remedy)

    @property
    def place(self) -> str:
        """The section of the documentation about this verdict."""
        return f"{PAGE}#{self.name.replace(' ', '-')}"


@dataclass
class Report:
    """What was looked at, by section, and what is wrong.

    Args:
        target (`str`): Name of the target.
        drafter (`str`): Name of the drafter.
        sections (`dict`): What was found, in the order in which it was looked at; those after a fault that stops all are missing.
        verdicts (`list[Verdict]`): What is wrong, the gravest first.
    """

    target: str
    drafter: str
    sections: dict[str, Section] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def conclusion(self) -> str:
        """The whole report in a sentence or two."""
        acceptance, costs = (self.sections.get(name, {}) for name in ("acceptance", "costs"))
        if not acceptance:
            return "Drafting does not work: " + "; ".join(verdict.name for verdict in self.verdicts) + "."
        length, speedup = acceptance["acceptance_length"], costs["speedup"]
        speed = "texts too short to time" if speedup is None else f"{speedup:.2f} times as fast as the target alone"
        found = f"{length:.2f} tokens a step, {speed}"
        if not self.verdicts and speedup is not None and speedup < 1:
            return f"No fault is found, but it does not pay: {found}. Longer texts give the tuner more time to learn what does."
        if not self.verdicts:
            return f"Nothing is wrong: {found}."
        return f"{found[0].upper()}{found[1:]}. What is wrong: " + "; ".join(v.name for v in self.verdicts) + "."

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        verdicts = [{**asdict(verdict), "place": verdict.place} for verdict in self.verdicts]
        return {
            "target": self.target,
            "drafter": self.drafter,
            **self.sections,
            "verdicts": verdicts,
            "conclusion": self.conclusion,
        }
