"""How a pipeline of Transformers takes a drafter: as an object, or by name as it takes stock assistants."""

import functools
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedModel

from .adapters import is_drafter


def wrap_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load_assistant_model` of Transformers, which knows no class of drafters and asks for a tokenizer of their own."""

    @functools.wraps(original)
    def load_assistant_model(model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        kind = _class_of(assistant_model) if isinstance(assistant_model, str) else None
        if kind is not None:
            assistant_model = kind.from_pretrained(assistant_model, dtype=model.dtype).to(model.device)
        if is_drafter(assistant_model):
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    return load_assistant_model


def _class_of(name_or_path: str) -> Any:
    """The class of the drafter of that name; None for any other model."""
    config = AutoConfig.from_pretrained(name_or_path)
    kind = AutoModel._model_mapping.get(type(config), None)
    return kind if is_drafter(kind) else None
