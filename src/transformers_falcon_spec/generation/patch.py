"""Wraps three methods of `GenerationMixin`, so that `target.generate(..., assistant_model=drafter)` runs the loop.

`enable` wraps them for every model, with the function by which pipelines load assistants, `attach` for one model.
Assistants that are not drafters of this package go to the original functions.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines

from ..errors import GenerationError, PatchError
from . import adapters
from .call import speculative_decoding
from .drafting import Drafter
from .model_parts import device_of
from .modes import check_target_mode
from .options import SpeculationConfig, check_drafter_options, check_no_stock_options, check_not_of_drafter
from .probe import check_kind

_LOOP = "_assisted_decoding"
_CHECK = "_validate_generation_mode"
_ARGUMENTS = "_extract_generation_mode_kwargs"
_LOADER = "load_assistant_model"
_STOCK_DRAFTS = ("use_mtp", "assistant_early_exit")  # options that need no assistant
_NEEDED = {
    _LOOP: ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model"),
    _CHECK: ("generation_mode", "generation_config", "generation_mode_kwargs"),
    _ARGUMENTS: ("custom_generate", "kwargs", "assistant_model"),
}
_IS_WRAPPED = "_is_falcon_spec_patch"


def enable() -> None:
    """Let `generate` of every model take the package's drafters. Importing the package calls this.

    Raises:
        [`PatchError`]: this version of Transformers has other functions than the ones to wrap.
    """
    for name, function in _wrapped(GenerationMixin).items():
        setattr(GenerationMixin, name, function)
    loader = getattr(pipelines, _LOADER, None)  # without it pipelines take drafters at each call, and say no to names
    if loader is not None:
        setattr(pipelines, _LOADER, _marked(_wrap_loader(_unwrapped(loader))))


def disable() -> None:
    """Give Transformers its own functions back."""
    for name in _WRAPPERS:
        setattr(GenerationMixin, name, _unwrapped(getattr(GenerationMixin, name)))
    if hasattr(pipelines, _LOADER):
        setattr(pipelines, _LOADER, _unwrapped(getattr(pipelines, _LOADER)))


@contextmanager
def without_patch(model: PreTrainedModel) -> Iterator[None]:
    """Give Transformers its own functions back for the time of the block, in all threads; not to an attached model."""
    was_enabled = hasattr(getattr(GenerationMixin, _LOOP), _IS_WRAPPED)

    try:
        disable()
        if hasattr(getattr(type(model), _LOOP), _IS_WRAPPED):
            raise PatchError(
                f"`{type(model).__name__}` must have Transformers' own functions here, but `attach` gave it others. "
                "Load the model anew."
            )

        yield
    finally:
        if was_enabled:
            enable()


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Let this one model take the package's drafters, through a subclass of its own; works without `enable`.

    The model is changed in place and returned. It saves and loads as before, but cannot be pickled.

    Raises:
        [`PatchError`]: this version of Transformers has other functions than the ones to wrap.
    """
    kind = type(model)
    if not hasattr(vars(kind).get(_LOOP), _IS_WRAPPED):
        model.__class__ = type(kind.__name__, (kind,), _wrapped(kind))
    return model


def _wrapped(owner: type) -> dict[str, Callable[..., Any]]:
    """The functions of `owner`, wrapped once; the signatures of all are checked before."""
    originals = {name: _unwrapped(getattr(owner, name, None)) for name in _WRAPPERS}
    for name, function in originals.items():
        parameters = inspect.signature(function).parameters if function is not None else {}
        missing = [needed for needed in _NEEDED[name] if needed not in parameters]
        if missing:
            raise PatchError(
                f"`GenerationMixin.{name}` must take {', '.join(_NEEDED[name])}, but this version of Transformers "
                f"{'has no such function' if function is None else 'lacks ' + ', '.join(missing)}. "
                "Use a tested version (see the README)."
            )
    return {name: _wrap(name, function) for name, function in originals.items()}


@functools.cache
def _wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same wrapper each time, so that a target is what it was once the patch is back."""
    return _marked(_WRAPPERS[name](function))


def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(function, stop=lambda inner: not hasattr(inner, _IS_WRAPPED))


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _IS_WRAPPED, True)
    return function


def drafter_of(assistant: Any) -> Drafter | None:
    """The drafter of this package that an assistant is, maybe inside a `PeftModel`; None for any other assistant."""
    drafter = adapters.unwrapped(assistant)
    return drafter if adapters.is_drafter(drafter) else None


def _wrap_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(self: PreTrainedModel, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        drafter = drafter_of(assistant_model)
        if drafter is None:
            return original(self, *args, assistant_model=assistant_model, **kwargs)
        return speculative_decoding(self, *args, drafter=drafter, **kwargs)

    return _assisted_decoding


def _wrap_check(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: PreTrainedModel, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        adapters.check_is_model(assistant)
        drafter = drafter_of(assistant)
        if drafter is None:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)

        with adapters.row_adapters_gone_on_error(self):
            _check_drafts(generation_config)
            check_kind(self)
            if generation_mode_kwargs.get("synced_gpus"):
                raise GenerationError(
                    "`synced_gpus` is not supported with a drafter. Generate without `assistant_model`."
                )

            adapters.check_drafter_adapter(assistant)
            check_drafter_options(drafter)
            drafter.check_target(self)
            check_target_mode(self)
            one_each = copy.copy(generation_config)  # the loop takes the rows that `generate` makes of a prompt
            one_each.num_return_sequences = 1
            if self._is_stateful:  # the one thing that Transformers refuses here and this package takes
                generation_mode = GenerationMode.SAMPLE if one_each.do_sample else GenerationMode.GREEDY_SEARCH
            original(self, generation_mode, one_each, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _extract_generation_mode_kwargs(
        self: PreTrainedModel,
        custom_generate: Any,
        kwargs: dict[str, Any],
        synced_gpus: Any,
        assistant_model: Any,
        streamer: Any,
    ) -> dict[str, Any]:
        if drafter_of(assistant_model) is not None:
            with adapters.row_adapters_gone_on_error(self):
                _check_arguments(custom_generate, kwargs)
        return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)

    return _extract_generation_mode_kwargs


def _wrap_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let pipelines load drafters by name, whose classes the original does not know, and without a tokenizer."""

    @functools.wraps(original)
    def load_assistant_model(model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        if isinstance(assistant_model, str):
            kind: Any = AutoModel._model_mapping.get(type(AutoConfig.from_pretrained(assistant_model)), None)
            if adapters.is_drafter(kind):
                assistant_model = kind.from_pretrained(assistant_model, dtype=model.dtype).to(device_of(model))
        if adapters.is_drafter(assistant_model):
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    return load_assistant_model


_WRAPPERS = {_LOOP: _wrap_loop, _CHECK: _wrap_check, _ARGUMENTS: _wrap_arguments}


def _check_arguments(custom_generate: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what Transformers would not bring to the loop, or would take for misspelt."""
    if custom_generate is not None:
        raise GenerationError(
            "A call must have one way of decoding, but `custom_generate` is a function, to which Transformers passes "
            "no `assistant_model`: the drafter would be ignored. Leave out one of them."
        )

    check_not_of_drafter(kwargs)


def _check_drafts(config: Any) -> None:
    """Refuse options of a call that would draft, or choose what becomes text, in another way."""
    if isinstance(config, SpeculationConfig):
        check_not_of_drafter(config.set_options())
    check_no_stock_options(config)
    if (config.num_beams or 1) > 1:
        raise GenerationError(
            f"A drafter works with greedy decoding and sampling, but `num_beams` is {config.num_beams}: Transformers "
            "would search beams and ignore the drafter. Set `num_beams=1`, or leave out `assistant_model`."
        )

    if getattr(config, "dola_layers", None) is not None:
        raise GenerationError(
            "`dola_layers` chooses tokens by contrasting layers, which Transformers leaves out beside a drafter. "
            "Leave out one of them."
        )

    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise GenerationError(
            "`assistant_ensemble_weight` mixes the drafter into the text; this package never changes the target's "
            "output. Leave it out."
        )

    stock = next((name for name in _STOCK_DRAFTS if getattr(config, name, None)), None)
    if stock is not None:
        raise GenerationError(
            f"A call must have one drafter, but beside `assistant_model` it has `{stock}`, by which Transformers lets "
            "parts of the target draft. Leave out one of them."
        )

    if getattr(config, "prompt_lookup_num_tokens", None) is not None:
        raise GenerationError(
            "With a drafter, repeated text is a branch of its drafts, so `prompt_lookup_num_tokens` of the call must "
            f"be None, but it is {config.prompt_lookup_num_tokens}. Set it in `drafter.generation_config`, or leave "
            "out `assistant_model`."
        )
