"""How the steps of a call are made: decided once, of target, drafter and call, before the prompt is read."""

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..errors import GenerationError
from .capture.eligibility import BUSY, NO_MEMORY, is_wanted, why_not_captured
from .drafting import Drafter
from .probe import Capability
from .target import Form
from .text_limits import TextLimits

BACKEND = "inductor"  # of `torch.compile`
FORMS = {
    "paths": "The target verifies one row for each path of a draft",
    "chain": "The target verifies chains only",
    "plain": "The target reads one token at a time, and nothing is drafted",
}


@dataclass(frozen=True)
class StepPlan:
    """How the steps of one call are made."""

    form: Form  # in which the target reads drafts
    has_hooks: bool  # features come from hooks; False: from the hidden states that a forward returns
    captures: bool  # the text goes on in fixed shapes, if that is still possible after the prompt
    backend: str | None  # with which `torch.compile` compiles forwards of fixed shape, if it does
    notes: tuple[str, ...]  # what of this is not as usual, a sentence each


def plan_of(
    model: PreTrainedModel,
    drafter: Drafter,
    config: GenerationConfig,
    capability: Capability,
    num_rows: int,
    num_processes: int,
    max_tokens: int,
) -> StepPlan:
    """The plan of a call of `num_rows` rows and `max_tokens` tokens at most, whose target has this `capability`.

    Raises:
        [`GenerationError`]: the drafter's options ask for captured steps, which such a call cannot have.
    """
    options = drafter.generation_config
    form = _form_of_call(capability, num_rows, config)
    notes = _notes_of(model, form, capability, num_processes, max_tokens)

    captures = is_wanted(options.capture, model.device)
    if captures:
        reason = why_not_captured(model, form, num_processes, capability.has_hooks)
        captures = reason is None
        notes += notes_of_uncaptured(drafter, reason)

    is_compiled = captures and options.compile and not config.disable_compile
    return StepPlan(form, capability.has_hooks, captures, BACKEND if is_compiled else None, tuple(notes))


def _form_of_call(capability: Capability, num_rows: int, config: GenerationConfig) -> Form:
    """How the target reads drafts in one call."""
    if num_rows > 1:
        return capability.batch_form
    if capability.form == "paths" and config.output_attentions:
        return "chain"  # the attention weights of paths stand in other slots
    return capability.form


def _notes_of(
    model: PreTrainedModel, form: Form, capability: Capability, num_processes: int, max_tokens: int
) -> list[str]:
    notes = []
    if num_processes > 1:
        notes.append(f"{num_processes} processes write this text together: the first one decides for all of them.")
    if form != "tree":
        notes.append(f"{FORMS[form]}: {capability.reason}.")
    notes += TextLimits.of_model(model).notes(max_tokens)
    if not capability.has_hooks:
        notes.append("Hooks may not fire in this target: features come from `output_hidden_states`.")

    quantizer: Any = getattr(model, "hf_quantizer", None)
    if form != "plain" and getattr(quantizer and quantizer.quantization_config, "load_in_8bit", False):
        notes.append(
            "The target's int8 layers (bitsandbytes) also round their inputs, by all tokens that are read together. "
            "So the text can differ from that of plain decoding, as the text of a plain batch can."
        )

    return notes


def notes_of_uncaptured(drafter: Drafter, reason: str | None) -> list[str]:
    """What to say of a step that is not captured for this reason; an error where the options ask for captured ones."""
    if reason is None:
        return []
    if drafter.generation_config.capture is True and reason not in {BUSY, NO_MEMORY}:
        raise GenerationError(
            f"`capture=True` needs a call that can be captured, but {reason}. Set "
            '`drafter.generation_config.capture = "auto"`, which decodes such calls uncaptured.'
        )

    return [f"The step is not captured: {reason}."]
