"""The doctor's check whether the steps of a pair can be decoded in fixed shapes, and what is held for that."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...drafters.base import DrafterModel
from ...errors import GenerationError
from ...generation.model_parts import device_of
from ...generation.static.graph import is_captured
from ...generation.static.state import states_of
from ..methods import with_options
from .findings import Section

MAX_NEW_TOKENS = 8  # of the text that is written to see
FIXED = {"target": "in fixed shapes", "drafter": "in fixed shapes", "choice": "on the device"}
NOTES = {  # how notes of a call begin, and the part of a step that they are about
    "The step is dynamic": "target",
    "Drafts are not made in fixed shapes": "drafter",
    "The host chooses tokens": "choice",
    "Some of the work could not be captured and ran without": "capture",
}


def check_static_step(target: PreTrainedModel, drafter: DrafterModel, input_ids: Tensor) -> Section:
    """The section on fixed shapes: a short text is written in them, with the target's own options.

    For each part of a step it says that it is in fixed shapes, or why not.
    """
    options = copy.deepcopy(drafter.generation_config)
    options.step = "static"
    static = with_options(drafter, options)  # what is held for it goes with it
    device = device_of(target)
    capture = "captured" if is_captured(device) else f"nothing is captured on a {device.type.upper()}"
    shown = FIXED | {"capture": capture}
    try:
        found = _reasons(target, static, input_ids)
    except GenerationError as error:
        reason = str(error).partition(" Set `")[0]
        return {"is_static": False, "target": reason, "drafter": None, "choice": None, "capture": shown["capture"]}
    return {"is_static": not found.keys() & FIXED.keys(), **shown, **found, **_held(target)}


def _reasons(target: PreTrainedModel, drafter: Any, input_ids: Tensor) -> dict[str, str]:
    """By part of a step, why it was not in fixed shapes or not captured."""
    device = device_of(target)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        out: Any = target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
            input_ids.to(device),
            attention_mask=torch.ones_like(input_ids, device=device),
            assistant_model=drafter,
            max_new_tokens=MAX_NEW_TOKENS,
            return_dict_in_generate=True,
        )
    notes = [note.partition(": ") for note in out.speculation.notes]
    return {NOTES[beginning]: reason for beginning, _, reason in notes if beginning in NOTES}


def _held(target: PreTrainedModel) -> Section:
    """What is held of the texts that were written with the target in fixed shapes."""
    states, device = states_of(target), target.device
    graphs = {
        "num_graphs": sum(state.num_graphs for state in states),
        "capture_seconds": sum(state.capture_seconds for state in states),
        "reserved_bytes": torch.cuda.memory_reserved(device),  # all that PyTorch has of the device, graphs included
    }
    return {"kept_bytes": sum(state.num_bytes for state in states)} | (graphs if is_captured(device) else {})
