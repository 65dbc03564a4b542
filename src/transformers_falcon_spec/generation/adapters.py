"""Adapters of PEFT around a target or a drafter: what of them decoding can serve. Told by what they have, for PEFT may not be there."""

import os
from typing import Any

from ..errors import GenerationError


def unwrapped(model: Any) -> Any:
    """The model inside a `PeftModel`, whose layers carry the adapter; any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def is_drafter(model: Any) -> bool:
    """Whether this is a drafter of this package, or a class of them."""
    return callable(getattr(model, "candidate_generator", None))


def check_is_model(assistant: Any) -> None:
    """Refuse a name or a class where a model is asked for.

    Raises:
        [`GenerationError`]: it is one.
    """
    if isinstance(assistant, str | os.PathLike):
        raise GenerationError(
            f"`assistant_model` must be a model that is loaded, but it is the name or path {str(assistant)!r}. Load it first, a drafter "
            "with `from_pretrained` of its class, such as `FalconSpecDrafter.from_pretrained(...)`."
        )
    if isinstance(assistant, type):
        raise GenerationError(
            f"`assistant_model` must be a model, but it is the class `{assistant.__name__}`. Make one: "
            f"`{assistant.__name__}.from_pretrained(...)`."
        )


def check_target_adapter(model: Any) -> None:
    """Refuse PEFT's prompt learning: it puts tokens without ids before the prompt, in this call only.

    Raises:
        [`GenerationError`]: the target has such an adapter.
    """
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)  # PEFT lends the model its own method
    adapter: Any = getattr(owner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise GenerationError(
            f"A drafter reads the text that the target reads, but this adapter ({adapter.peft_type.value}) puts "
            f"{adapter.num_virtual_tokens} virtual tokens before it. Generate without `assistant_model`, or use an adapter that "
            "changes weights, such as LoRA."
        )


def check_drafter_adapter(assistant: Any) -> None:
    """Refuse what a `PeftModel` around a drafter says and the drafter inside does not hear.

    Raises:
        [`GenerationError`]: an adapter that changes no weights of the drafter, or options set on the wrapper.
    """
    drafter = unwrapped(assistant)
    if drafter is assistant:
        return
    adapter = assistant.active_peft_config
    if adapter.is_prompt_learning:
        raise GenerationError(
            f"An adapter of a drafter must change its weights, as LoRA does, but this one is {adapter.peft_type.value}. Pass the "
            "drafter without it: `assistant_model=model.get_base_model()`."
        )
    if "generation_config" in vars(assistant):
        raise GenerationError(
            "Options of a drafter must be set on the drafter itself, but here the `PeftModel` around it has a `generation_config` of "
            "its own. Set `model.get_base_model().generation_config`, or merge the adapter: `model.merge_and_unload()`."
        )
