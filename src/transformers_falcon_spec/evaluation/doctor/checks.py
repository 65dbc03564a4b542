"""What the doctor checks before any text is written: machine, files, target, trees, chat template and lengths."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafters.base import DrafterModel
from ...drafters.compatibility.fingerprint import FIELD, TargetFingerprint
from ...drafters.compatibility.mismatches import OTHER_TARGET, mismatches_of
from ...errors import DrafterMismatchError, GenerationError, TargetError, TrainingError
from ...generation.eligible import check_kind, check_target
from ...generation.packed_linear import free_bytes
from ...generation.probe import reads_masks
from ...provenance import provenance
from ...training.chat_template import ChatTemplate
from ...training.dataset import LOW_SHARE, ConversationDataset
from .report import Report, Section, finding

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
_POINTER = b"version https://git-lfs"


def environment(device: str) -> Section:
    """The section on versions, device and threads, and on how busy and how full the machine is."""
    origin = provenance(device=device)
    return {
        **{name: origin[name] for name in ("versions", "device", "threads", "commit")},
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "free_bytes": free_bytes() or None,  # 0 where the system does not say
    }


def folder_of(name: str) -> Path | None:
    """The folder of a checkpoint, given by path or by Hub name; None if it is not on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None


def training_record(name: str) -> dict[str, Any]:
    """The record of the training of the drafter called `name`; empty where there is none."""
    path = (folder_of(name) or Path(name)) / "training.json"
    return {"path": str(path), **json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}


def add_unreadable(report: Report, name: str, error: Exception) -> None:
    """Add the fault of a checkpoint that could not be loaded because of `error`."""
    folder = folder_of(name)
    faults = [] if folder is None else file_faults(folder)
    if faults:
        report.add("truncated weights", f"The weights of `{name}` are not whole: {'; '.join(faults)}.")
    else:
        report.add("broken checkpoint", f"`{name}` cannot be loaded: {error}")


def file_faults(folder: Path) -> list[str]:
    """What is wrong with the safetensors files of a folder, as far as their headers show."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                continue
        except SafetensorError as error:
            with path.open("rb") as file:
                is_pointer = file.read(len(_POINTER)) == _POINTER
            size = path.stat().st_size
            cut = f"is cut short, or no safetensors file, at {size} bytes ({error})"
            found.append(f"`{path.name}` {'is a pointer of Git LFS' if is_pointer else cut}")

    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            found.append(f"`{index.name}` is no index")
            continue
        found += [f"`{shard}` is missing" for shard in sorted(shards) if not (folder / shard).is_file()]
    return found


def check_pair(
    drafter: DrafterModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: Report,
    template_kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Report what the drafter's config says of its target, and what differs; True if the two can work together."""
    stored = getattr(drafter.config, FIELD, None)
    given = TargetFingerprint.of_target(target, tokenizer)
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
            report.findings.insert(0, finding(OTHER_TARGET, str(error)))
        return False
    return True


def check_tree_reading(target: PreTrainedModel, report: Report) -> bool:
    """Report how the target reads draft trees; True if it can verify anything at all."""
    section = report.sections["reading"] = {"form": None}
    can_verify = False
    try:
        check_kind(target)
        section["reads_masks"] = None
        with suppress(Exception):  # a model may raise anything here; the probe decides what it can do
            section["reads_masks"] = reads_masks(target)
        found = check_target(target)
        can_verify = True
        for name in ("form", "tree_error", "control_error", "reason", "has_hooks", "head_fault"):
            section[name] = getattr(found, name)
    except (GenerationError, TargetError) as error:
        section["reason"] = str(error)

    kind = type(target).__name__
    if can_verify and section["form"] == "tree":
        pass
    elif section.get("reads_masks") is False:
        report.add(
            "mask bug",
            f"The attention of `{kind}` (`{target.config._attn_implementation}`) ignores masks: a node's logits are "
            "the same whatever its parent is. Drafts are read as chains or as rows, or not at all. "
            f"{section['reason']}",
        )
    elif can_verify:
        text = f"`{kind}` cannot read a tree in one forward, so fewer drafts fit into a step: {section['reason']}"
        report.add("no trees", text)
    else:
        report.add("no drafts", str(section["reason"]))
    return can_verify


def check_template(
    tokenizer: PreTrainedTokenizerBase, report: Report, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Report how much of two short conversations the chat template marks as text of the assistant."""
    section = report.sections["template"] = {"has_template": tokenizer.chat_template is not None}
    if tokenizer.chat_template is None:
        return

    rows = CONVERSATIONS
    if ChatTemplate(tokenizer, template_kwargs or {}).thinks:
        rows = [[turn if turn["role"] == "user" else {**turn, **THOUGHT} for turn in row] for row in rows]
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
    report.add("template mask", f"{problem} A drafter trained with it learns from what is marked alone.")


def check_length(drafter: DrafterModel, longest: int, record: Mapping[str, Any], report: Report) -> None:
    """Report the trained length and the window of a drafter, and find texts up to `longest` tokens beyond both.

    The trained length stands in the record of the training, else it is the context in the drafter's config. Drafters
    without a window of their own have no attention over the text, or a whole model's.
    """
    if not drafter.has_window:
        return
    window = drafter.sliding_window
    trained = record.get("trained_length", drafter.config.max_position_embeddings)
    report.sections["length"] = {"longest_text": longest, "trained_length": trained, "sliding_window": window}
    if min(longest, window or longest) > trained:
        text = (
            f"Texts get up to {longest:,} tokens long, and the drafter looks back over more than the {trained:,} of "
            "which it learned: drafts get worse beyond."
        )
        report.add("long texts", text, trained=trained)
