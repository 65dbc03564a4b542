"""Checks of a pair before any text is written: environment, stored target, tree attention and chat template."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.base import DrafterModel
from ...drafters.compatibility.fingerprint import FIELD, TargetFingerprint
from ...drafters.compatibility.mismatches import OTHER_TARGET, Finding, mismatches_of
from ...errors import DrafterMismatchError, GenerationError, TargetError, TrainingError
from ...generation.eligible import check_kind, check_target
from ...generation.packed_linear import free_bytes
from ...generation.probe import reads_masks
from ...provenance import provenance
from ...training.chat_template import ChatTemplate
from ...training.dataset import LOW_SHARE, ConversationDataset
from .findings import MASK_BUG, NO_DRAFTS, NO_TREES, TEMPLATE_MASK, Report, Section

logger = logging.getLogger(__name__)

MAX_LENGTH = 512
THOUGHT = {"reasoning_content": "A short question, which needs no more than one step."}
CONVERSATIONS = [
    [
        {"role": "user", "content": "What is 3 plus 4?"},
        {"role": "assistant", "content": "3 plus 4 is 7. Take three things, add four more, and count them all."},
        {"role": "user", "content": "And times 2?"},
        {"role": "assistant", "content": "7 times 2 is 14, because two groups of seven are fourteen."},
    ],
    [
        {"role": "user", "content": "Name a large river."},
        {"role": "assistant", "content": "The Amazon is a large river in South America."},
    ],
]


def environment(device: str) -> Section:
    """The section on versions, device and threads, and on how busy and how full the machine is."""
    origin = provenance(device=device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    names = ("versions", "device", "threads", "commit")
    free = free_bytes() or None  # 0 where the system does not say
    return {name: origin[name] for name in names} | {"usable_cores": cores, "load": load, "free_bytes": free}


def check_pair(
    drafter: DrafterModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: Report,
    template_kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Report what the drafter's config says of its target, and what differs; True if the two can work together."""
    stored, given = getattr(drafter.config, FIELD, None), TargetFingerprint.of_target(target, tokenizer)
    report.sections["fingerprint"] = {
        "made_for": drafter.config.target_name_or_path,
        "is_stored": stored is not None,
        "known_weights": sorted(stored["weights"]) if stored else [],
        "not_looked_at": given.skipped,
        "dtype": given.dtype,
    }
    found = mismatches_of(drafter, target, tokenizer, template_kwargs)
    report.findings += found
    try:
        drafter.check_target(target)
    except DrafterMismatchError as error:
        if not any(mismatch.is_fatal for mismatch in found):
            remedy = "Take a drafter for this target: `falcon-spec find`, or `falcon-spec train`."
            report.findings.insert(0, Finding(OTHER_TARGET, str(error), remedy))
        return False
    return True


def check_target_alone(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: Report,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Report whether a target can be drafted for, and what its chat template marks for training."""
    if check_tree_reading(target, report):
        check_template(tokenizer, report, template_kwargs)


def check_tree_reading(target: PreTrainedModel, report: Report) -> bool:
    """Report how the target reads draft trees; True if it can verify anything at all."""
    section: Section = {"form": None}
    report.sections["reading"] = section
    try:
        check_kind(target)
    except GenerationError as error:
        section["reason"] = str(error)
        report.add(NO_DRAFTS, str(error), "Take a target whose layers are all attention, without an encoder.")
        return False
    section["reads_masks"] = _respects_masks(target)
    try:
        found = check_target(target)
    except TargetError as error:
        section["reason"] = str(error)
        if section["reads_masks"] is False:
            _add_tree_fault(target, report)
        else:
            report.add(NO_DRAFTS, str(error), "docs/architectures.md lists targets that can be drafted for.")
        return False
    names = ("form", "tree_error", "control_error", "reason", "has_hooks", "head_fault")
    section.update({name: getattr(found, name) for name in names})
    if found.form != "tree":
        _add_tree_fault(target, report)
    return True


def _respects_masks(target: PreTrainedModel) -> bool | None:
    """Whether attention follows the mask that it is given; None if the target fails before that is known."""
    try:
        return reads_masks(target)
    except Exception as error:  # noqa: BLE001  a model may raise anything here; the probe decides what it can do
        logger.info("Trees of two shapes cannot be compared: %s", error)
        return None


def _add_tree_fault(target: PreTrainedModel, report: Report) -> None:
    kind, attention, section = type(target).__name__, target.config._attn_implementation, report.sections["reading"]
    if section["reads_masks"] is False:
        text = (
            f"The attention of `{kind}` (`{attention}`) ignores masks: a node's logits are the same whatever "
            f"its parent is. Drafts are read as chains or as rows, or not at all. {section['reason']}"
        )
        report.add(MASK_BUG, text, 'Load it with `attn_implementation="sdpa"` or `"eager"`, or mend its attention.')
        return
    text = f"`{kind}` cannot read a tree in one forward, so fewer drafts fit into a step: {section['reason']}"
    remedy = "Expect less of trees with this target; docs/architectures.md lists those that read them."
    report.add(NO_TREES, text, remedy)


def check_template(
    tokenizer: PreTrainedTokenizerBase, report: Report, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Report how much of two short conversations the chat template marks as text of the assistant."""
    section = report.sections["template"] = {"has_template": tokenizer.chat_template is not None}
    if tokenizer.chat_template is None:
        return
    thinks = ChatTemplate(tokenizer, template_kwargs or {}).thinks
    rows = [
        [{**turn, **THOUGHT} if thinks and turn["role"] == "assistant" else turn for turn in row]
        for row in CONVERSATIONS
    ]
    try:
        found = ConversationDataset(rows, tokenizer, MAX_LENGTH, template_kwargs=template_kwargs).coverage
    except TrainingError as error:
        section["error"] = problem = str(error)
    else:
        section |= {"share": found.share, "turns": found.num_turns, "marked_runs": found.num_runs}
        if found.share >= LOW_SHARE and found.num_runs >= found.num_turns:
            return
        marked = f"the template marks {found.num_runs}, {found.share:.0%} of the tokens."
        problem = f"Of {found.num_turns} turns of the assistant {marked}"
    report.add(
        TEMPLATE_MASK,
        f"{problem} A drafter trained with it learns from what is marked alone.",
        "Look at the mask with `falcon-spec train --show_masks`, and mend the `{% generation %}` marks.",
    )
