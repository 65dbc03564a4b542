"""The faults that the doctor knows, with its questions and its advice, and the report of what it found."""

from dataclasses import dataclass, field
from typing import Any

from ...drafters.compatibility.mismatches import OTHER_DTYPE, OTHER_TARGET, QUANTISED, WRONG_TEMPLATE, Finding

Section = dict[str, Any]
_FORMS = {"tree": "trees", "paths": "each path of a tree as a row", "chain": "chains"}


@dataclass(frozen=True)
class Fault:
    """Something that the doctor looks for, under a name that has a section in docs/troubleshooting.md."""

    question: str  # "yes" is well
    section: str  # of the report, which is there once the question was asked
    advice: str = ""  # what to do, with numbers of the case in braces; mismatches of a pair bring their own


FAULTS = {
    "truncated weights": Fault(
        "Are the weights' files whole?",
        "reading",
        "Fetch the files again; `git lfs pull` fetches what a pointer stands for.",
    ),
    "broken checkpoint": Fault(
        "Can they be loaded?",
        "reading",
        "Take another checkpoint, or convert it if it is other software's.",
    ),
    OTHER_TARGET: Fault(
        "Is this the drafter's target?",
        "fingerprint",
        "Take a drafter for this target: `falcon-spec find`, or `falcon-spec train`.",
    ),
    QUANTISED: Fault("Are the target's weights quantised as in its training?", "fingerprint"),
    OTHER_DTYPE: Fault("Does the target compute in the type of its training?", "fingerprint"),
    WRONG_TEMPLATE: Fault("Is the chat template that of its training?", "fingerprint"),
    "no drafts": Fault(
        "Can the target be drafted for?",
        "reading",
        "Take a target whose layers are all attention, without an encoder; docs/architectures.md lists such.",
    ),
    "mask bug": Fault(
        "Does its attention follow masks?",
        "reading",
        'Load it with `attn_implementation="sdpa"` or `"eager"`, or mend its attention.',
    ),
    "no trees": Fault(
        "Does it read a tree in one forward?",
        "reading",
        "Expect less of trees with this target; docs/architectures.md lists those that read them.",
    ),
    "template mask": Fault(
        "Does the chat template mark what the assistant says?",
        "template",
        "Look at the mask with `falcon-spec train --show_masks`, and mend the `{{% generation %}}` marks.",
    ),
    "long texts": Fault(
        "Are texts as long as those that the drafter learned from?",
        "length",
        "Set `sliding_window` to {trained} in its `config.json`, or `drafter.generation_config.sliding_window`.",
    ),
    "undertrained": Fault(
        "Has the drafter learned enough?",
        "acceptance",
        "Train it on with about {rows:,} more rows, {steps:,} steps of {rows_per_step}; conversations that it has not "
        "read teach more than the same ones again: `falcon-spec train --drafter ...`.",
    ),
    "low acceptance": Fault(
        "Are as many drafts kept as promised, or as pay?",
        "acceptance",
        "Compare the prompts and how they are put (system prompt, thinking mode, language) with what the drafter was "
        "trained on; train it on with answers of this target to such prompts.",
    ),
    "slow machine": Fault(
        "Can drafting pay on this machine?",
        "costs",
        "Take a smaller drafter, smaller trees (`num_tree_nodes`) or fewer rows, a larger target, or a machine with "
        "arithmetic to spare, on which nothing else runs; see docs/tuning.md.",
    ),
}


def finding(name: str, text: str, **numbers: int) -> Finding:
    """A fault that was found, with the advice for it."""
    return Finding(name, text, FAULTS[name].advice.format(**numbers))


@dataclass
class Report:
    """What the doctor found, the gravest first, and what it measured, by section.

    Sections stand in the order in which they were examined; those after a fault that stops everything are missing.
    """

    target: str
    drafter: str | None  # None: the target alone is examined
    sections: dict[str, Section] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, text: str, **numbers: int) -> None:
        """Add a fault that was found; `numbers` are those of its advice."""
        self.findings.append(finding(name, text, **numbers))

    @property
    def answers(self) -> dict[str, str]:
        """Each question that was asked, with yes or no."""
        found = {each.name for each in self.findings}
        asked = {name: fault for name, fault in FAULTS.items() if fault.section in self.sections or name in found}
        return {fault.question: "no" if name in found else "yes" for name, fault in asked.items()}

    @property
    def conclusion(self) -> str:
        """The whole report in a sentence or two."""
        names = "; ".join(each.name for each in self.findings)
        if "acceptance" not in self.sections:
            return self._conclusion_without_texts(names)

        speedup = self.sections["costs"]["speedup"]
        speed = "texts too short to time" if speedup is None else f"{speedup:.2f} times as fast as the target alone"
        found = f"{self.sections['acceptance']['acceptance_length']:.2f} tokens a step, {speed}."
        if self.findings:
            return f"{found[0].upper()}{found[1:]} What is wrong: {names}."
        if speedup is not None and speedup < 1:
            advice = "Longer texts give the tuner more time to learn what does."
            return f"No fault is found, but it does not pay: {found} {advice}"
        return f"Nothing is wrong: {found}"

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
        head = {"conclusion": self.conclusion, "findings": findings, "answers": self.answers}
        return {**head, "target": self.target, "drafter": self.drafter, **self.sections}


def documentation_of(found: Finding) -> str:
    """The section of the documentation that explains a finding."""
    return f"docs/troubleshooting.md#{found.name.replace(' ', '-')}"
