"""The environment, the contract, how the target reads trees, and what its chat template marks: a section of the report each."""

import logging
import os

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.base import DrafterModel
from ...drafters.compatibility.contract import FIELD, TargetContract
from ...drafters.compatibility.mismatches import OTHER_TARGET, mismatches_of
from ...errors import DrafterMismatchError, TargetError, TrainingError
from ...generation.probe import probe, reads_masks
from ...provenance import provenance
from ...training.dataset import ConversationDataset
from ...training.mask_coverage import LOW_SHARE
from .verdicts import MASK_BUG, NO_TREES, TEMPLATE_MASK, Section, Verdict

logger = logging.getLogger(__name__)

MAX_LENGTH = 512
TALK = [
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
    """Versions, device and threads, and how busy the machine is."""
    told = provenance(device=device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    names = ("versions", "device", "threads", "commit")
    return {name: told[name] for name in names} | {"usable_cores": cores, "load": load}


def contract(
    drafter: DrafterModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Section, list[Verdict], bool]:
    """What the drafter's config says of its target, what differs, and whether they can work together."""
    stored, given = getattr(drafter.config, FIELD, None), TargetContract.of(target, tokenizer)
    section: Section = {
        "made_for": drafter.config.target_name_or_path,
        "has_contract": stored is not None,
        "known_weights": sorted(stored["weights"]) if stored else [],
        "not_looked_at": given.skipped,
        "dtype": given.dtype,
    }
    found = mismatches_of(drafter, target, tokenizer)
    verdicts = [Verdict.of(mismatch) for mismatch in found]
    try:
        drafter.check_target(target)
    except DrafterMismatchError as error:
        if not any(mismatch.is_fatal for mismatch in found):
            remedy = "Take a drafter for this target: `falcon-spec find`, or `falcon-spec train`."
            verdicts.insert(0, Verdict(OTHER_TARGET, str(error), remedy))
        return section, verdicts, False
    return section, verdicts, True


def reading(target: PreTrainedModel) -> tuple[Section, list[Verdict], bool]:
    """How the target reads trees, and whether it can verify anything."""
    reads = _reads_masks(target)
    try:
        found = probe(target)
    except TargetError as error:
        section: Section = {"form": None, "reads_masks": reads, "reason": str(error)}
        return section, [_mask_verdict(target, str(error), reads)], False
    section = {
        "form": found.form,
        "reads_masks": reads,
        "tree_error": found.tree_error,
        "control_error": found.control_error,
        "reason": found.reason,
        "has_hooks": found.has_hooks,
    }
    return section, [] if found.can_tree else [_mask_verdict(target, found.reason, reads)], True


def _reads_masks(target: PreTrainedModel) -> bool | None:
    """None where the question cannot be asked."""
    try:
        return reads_masks(target)
    except Exception as error:  # noqa: BLE001  whatever a model raises that reads no trees; the probe says what becomes of it
        logger.info("Trees of two shapes cannot be compared: %s", error)
        return None


def _mask_verdict(target: PreTrainedModel, reason: str, reads: bool | None) -> Verdict:
    kind, attention = type(target).__name__, target.config._attn_implementation
    if reads is False:
        text = (
            f"The attention of `{kind}` (`{attention}`) ignores masks: a node's logits are the same whatever its parent is. Drafts are "
            f"read as chains or as rows, or not at all. {reason}"
        )
        return Verdict(
            MASK_BUG, text, 'Load it with `attn_implementation="sdpa"` or `"eager"`, or mend its attention.'
        )
    text = f"`{kind}` cannot read a tree in one forward, so fewer drafts fit into a step: {reason}"
    return Verdict(
        NO_TREES, text, "Expect less of trees with this target; docs/architectures.md lists those that read them."
    )


def template(tokenizer: PreTrainedTokenizerBase) -> tuple[Section, list[Verdict]]:
    """What of two short conversations the chat template marks as the assistant's."""
    if tokenizer.chat_template is None:
        return {"has_template": False}, []
    section: Section = {"has_template": True}
    try:
        found = ConversationDataset(TALK, tokenizer, MAX_LENGTH).coverage
    except TrainingError as error:
        return section | {"error": str(error)}, [_thin(str(error))]
    section |= {"share": found.share, "turns": found.num_turns, "marked_runs": found.num_runs}
    if found.share < LOW_SHARE or found.num_runs < found.num_turns:
        what = f"Of {found.num_turns} turns of the assistant the template marks {found.num_runs}, {found.share:.0%} of the tokens."
        return section, [_thin(what)]
    return section, []


def _thin(what: str) -> Verdict:
    text = f"{what} A drafter trained with it learns from what is marked alone."
    return Verdict(
        TEMPLATE_MASK,
        text,
        "Look at the mask with `falcon-spec train --show_masks`, and mend the `{% generation %}` marks.",
    )
