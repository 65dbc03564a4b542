"""Adapters of PEFT around a target or a drafter, checked and served without importing PEFT."""

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import GenerationError

_ROW_NAMES, _ROW_OFFSETS = "adapter_names", "alora_offsets"  # arguments of PEFT's hooks with an entry for each row


def unwrapped(model: Any) -> Any:
    """The model inside a `PeftModel`, whose layers carry the adapter; any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def is_drafter(model: Any) -> bool:
    """Whether this is a drafter of this package, or a class of them."""
    return callable(getattr(model, "candidate_generator", None))


def check_is_model(assistant: Any) -> None:
    """Raise an error if a name or a class was passed as `assistant_model`."""
    if isinstance(assistant, str | os.PathLike):
        raise GenerationError(
            f"`assistant_model` must be a model that is loaded, but it is the name or path {str(assistant)!r}. Load "
            "it first: a drafter with `transformers_falcon_spec.load_drafter(NAME, target)`, any other model with "
            "`from_pretrained` of its class."
        )

    if isinstance(assistant, type):
        raise GenerationError(
            f"`assistant_model` must be a model, but it is the class `{assistant.__name__}`. Make one: "
            f"`{assistant.__name__}.from_pretrained(...)`."
        )


def check_target_adapter(model: Any) -> None:
    """Raise an error for a target with PEFT's prompt learning, which puts tokens without ids before the prompt."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)  # PEFT lends the model its own method
    adapter: Any = getattr(owner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise GenerationError(
            f"A drafter reads the text that the target reads, but this adapter ({adapter.peft_type.value}) puts "
            f"{adapter.num_virtual_tokens} virtual tokens before it. Generate without `assistant_model`, or use an "
            "adapter that changes weights, such as LoRA."
        )


def check_drafter_adapter(assistant: Any) -> None:
    """Raise an error for prompt learning or options in a `PeftModel`, which do not reach the drafter inside."""
    drafter = unwrapped(assistant)
    if drafter is assistant:
        return

    adapter = assistant.active_peft_config
    if adapter.is_prompt_learning:
        raise GenerationError(
            "An adapter of a drafter must change its weights, as LoRA does, but this one is "
            f"{adapter.peft_type.value}. Pass the drafter without it: `assistant_model=model.get_base_model()`."
        )

    if "generation_config" in vars(assistant):
        raise GenerationError(
            "Options of a drafter must be set on the drafter itself, but here the `PeftModel` around it has a "
            "`generation_config` of its own. Set `model.get_base_model().generation_config`, or merge the adapter: "
            "`model.merge_and_unload()`."
        )


class RowAdapters:
    """The arguments by which PEFT's hooks choose an adapter for each row, adjusted to the rows of a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [hook for part in model.modules() for _, hook in _row_hooks(part)]
        self.is_needed = bool(self._hooks)  # rows take different adapters
        self.count_tokens = any(_ROW_OFFSETS in hook.keywords for hook in self._hooks)

    def of_nodes(self, num_rows: int, num_nodes: int, rows: Tensor | None = None) -> AbstractContextManager[None]:
        """New tokens that are read inside take their row's adapter; paths of one row share that of the row.

        `rows` of the call are read alone, where they are given.
        """

        def of_forward(name: str, value: list[Any] | None) -> list[Any] | None:
            if value is None:
                return None
            entries = list(value) * num_rows if len(value) == 1 else list(value)
            if rows is not None:
                entries = [entries[row] for row in rows.tolist()]
            # an activated LoRA begins so far from the end: one new token has it at any number but 0
            return entries if name == _ROW_NAMES else [start and max(start, num_nodes) for start in entries]

        return self._changed(of_forward)

    def suspended(self) -> AbstractContextManager[None]:
        """Forwards inside take the active adapter in all rows: their rows are not those of the call."""
        return self._changed(lambda _name, _value: None)

    @contextmanager
    def _changed(self, new_value: Any) -> Iterator[None]:
        before = [dict(hook.keywords) for hook in self._hooks]
        try:
            for hook in self._hooks:
                hook.keywords.update({name: new_value(name, value) for name, value in hook.keywords.items()})
            yield
        finally:
            for hook, keywords in zip(self._hooks, before, strict=True):
                hook.keywords.update(keywords)


@contextmanager
def row_adapters_gone_on_error(model: nn.Module) -> Iterator[None]:
    """Remove PEFT's hooks if the call inside raises; PEFT itself removes them only after a call that returns."""
    try:
        yield
    except BaseException:
        for part in model.modules():
            for key, _ in _row_hooks(part):
                part._forward_pre_hooks.pop(key)
                part._forward_pre_hooks_with_kwargs.pop(key, None)

        raise


def _row_hooks(part: nn.Module) -> list[tuple[int, functools.partial[Any]]]:
    found = []
    for key, hook in part._forward_pre_hooks.items():
        if isinstance(hook, functools.partial) and {_ROW_NAMES, _ROW_OFFSETS} & hook.keywords.keys():
            found.append((key, hook))
    return found
