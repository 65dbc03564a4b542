"""The faults that the doctor knows by name, and the report that lists those it found."""

from dataclasses import dataclass, field
from typing import Any

from ...drafters.compatibility.mismatches import OTHER_DTYPE, OTHER_TARGET, QUANTISED, WRONG_TEMPLATE, Finding

TRUNCATED = "truncated weights"
BROKEN = "broken checkpoint"
MASK_BUG = "mask bug"
NO_DRAFTS = "no drafts"
NO_TREES = "no trees"
TEMPLATE_MASK = "template mask"
LONG_TEXTS = "long texts"
UNDERTRAINED = "undertrained"
LOW_ACCEPTANCE = "low acceptance"
SLOW_MACHINE = "slow machine"
NAMES = (  # each has a section in docs/troubleshooting.md
    *(TRUNCATED, BROKEN, OTHER_TARGET, QUANTISED, OTHER_DTYPE, WRONG_TEMPLATE, TEMPLATE_MASK, MASK_BUG),
    *(NO_DRAFTS, NO_TREES, LONG_TEXTS, UNDERTRAINED, LOW_ACCEPTANCE, SLOW_MACHINE),
)
Section = dict[str, Any]
_FORMS = {"tree": "trees", "paths": "each path of a tree as a row", "chain": "chains"}


def documentation_of(finding: Finding) -> str:
    """The section of the documentation that explains a finding."""
    return f"docs/troubleshooting.md#{finding.name.replace(' ', '-')}"


@dataclass
class Report:
    """What the doctor measured, by section, and what it found, the gravest first.

    Sections stand in the order in which they were examined; those after a fault that stops everything are missing.
    """

    target: str
    drafter: str | None  # None: the target alone is examined
    sections: dict[str, Section] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, text: str, remedy: str) -> None:
        """Add a finding, whose name is one of `NAMES`."""
        self.findings.append(Finding(name, text, remedy))

    @property
    def conclusion(self) -> str:
        """The whole report in a sentence or two."""
        acceptance, costs = (self.sections.get(name, {}) for name in ("acceptance", "costs"))
        names = "; ".join(finding.name for finding in self.findings)
        if not acceptance:
            return self._conclusion_without_texts(names)
        length, speedup = acceptance["acceptance_length"], costs["speedup"]
        speed = "texts too short to time" if speedup is None else f"{speedup:.2f} times as fast as the target alone"
        found = f"{length:.2f} tokens a step, {speed}"
        if self.findings:
            return f"{found[0].upper()}{found[1:]}. What is wrong: {names}."
        if speedup is not None and speedup < 1:
            advice = "Longer texts give the tuner more time to learn what does."
            return f"No fault is found, but it does not pay: {found}. {advice}"
        return f"Nothing is wrong: {found}."

    def _conclusion_without_texts(self, names: str) -> str:
        if self.drafter is not None:
            return f"Drafting does not work: {names}."
        reading = self.sections.get("reading", {})
        if reading.get("form") is None:
            return f"`{self.target}` cannot be drafted for: {names}."
        without_head = ", by drafters that do without its head" if reading["head_fault"] else ""
        return f"`{self.target}` can be drafted for{without_head}: it verifies {_FORMS[reading['form']]}."

    def to_json(self) -> dict[str, Any]:
        """The report as `falcon-spec doctor --json` prints it."""
        findings = [
            {"name": each.name, "text": each.text, "remedy": each.remedy, "documentation": documentation_of(each)}
            for each in self.findings
        ]
        models = {"target": self.target, "drafter": self.drafter}
        return {**models, **self.sections, "findings": findings, "conclusion": self.conclusion}
