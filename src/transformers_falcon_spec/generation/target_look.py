"""What a target is made of, seen in one walk: all that may change how it reads, and whose code runs in it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .capture.eligibility import kernels_key
from .model_parts import autocast_type, path_of
from .packed_linear import PackedLinear

_KNOWN_CODE = {"transformers", "transformers_falcon_spec", "torch", "accelerate", "peft"}  # whose hooks are no riddle
_TABLES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
_SHORT_TYPES = (torch.bfloat16, torch.float16)  # to which sums are rounded


@dataclass(frozen=True)
class TargetLook:
    """What one walk over a target saw."""

    key: int  # another one after any change of what the target is made of
    guests: int  # another one after any change of adapters, and of hooks and forwards of the caller's
    foreign: str  # such a hook or forward, in words, whose code may do anything at any time; or nothing
    rounding: float  # of the coarsest type in which it computes, relative


def look_at(model: PreTrainedModel) -> TargetLook:
    """Look at every part of a model: its class, what it holds, its hooks and adapters, and the types of tensors."""
    facts: list[Any] = [autocast_type(model), *kernels_key()]
    for config in (model.config, model.config.get_text_config(decoder=True)):
        facts += map(id, vars(config).values())
    kinds: set[type] = set()
    types: set[Any] = {autocast_type(model)}
    guests: list[Any] = []
    is_global = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    foreign = "a hook on all modules of the process" if is_global else ""

    for part in model.modules():
        state = vars(part)
        kind = nn.Linear if type(part) is PackedLinear else type(part)  # which a call makes of the other, and back
        kinds.add(kind)
        facts.append(hash((kind, *map(id, state.values()))))

        for tensor in (*state["_parameters"].values(), *state["_buffers"].values()):
            if tensor is not None:
                types.add(tensor.dtype)
                facts += (type(tensor), tensor.dtype, tensor.device)

        if "compute_dtype" in state:  # of a layer that unpacks its weights to read
            types.add(state["compute_dtype"])
        if "merged_adapters" in state:
            guests.append(_of_adapters(state))
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state:
            code = _foreign_code(part)
            guests += code
            if code and not foreign:
                path = path_of(model, part) or type(model).__name__
                foreign = f"{'a hook on' if code[0] else 'a forward put on'} `{path}`"

    facts += _of_code(kinds)
    key = hash((*facts, *guests))
    rounding = max(torch.finfo(each).eps for each in (torch.float32, *types.intersection(_SHORT_TYPES)))
    return TargetLook(key, hash(tuple(guests)), foreign, rounding)


def _foreign_code(part: nn.Module) -> list[int]:
    """The numbers of the caller's hooks on one part; then 0 and a number for a forward of the caller's."""
    hooks = (*part._forward_hooks.items(), *part._forward_pre_hooks.items())
    found = [1 + number for number, hook in hooks if _package_of(hook) not in _KNOWN_CODE]
    forward = vars(part).get("forward")
    if forward is None or hasattr(part, "_hf_hook") or hasattr(forward, "_torchdynamo_orig_callable"):
        return found

    is_own = isinstance(forward, MethodType) and forward.__self__ is part
    is_plain = is_own and getattr(forward.__func__, "__closure__", None) is None
    return found if is_plain else [*found, 0, id(forward)]


def _package_of(hook: Any) -> str:
    """The package whose code a hook runs."""
    code = getattr(hook, "func", hook)  # of a `functools.partial`
    name = getattr(code, "__module__", None) or type(code).__module__
    return str(name).partition(".")[0]


def _of_adapters(state: dict[str, Any]) -> int:
    """What PEFT changes in a layer of an adapter: which ones are active and merged, and how much each counts."""
    lists = [value for name, value in state.items() if name[0] != "_" and type(value) in (list, dict)]
    return hash(str([state.get("_active_adapter"), state.get("_disable_adapters"), *lists]))


def _of_code(kinds: set[type]) -> Iterator[int]:
    """The functions that forwards call: of the classes, of their files, and those that are chosen by name."""
    bases = {base for kind in kinds for base in kind.__mro__}

    for base in bases:
        for name, value in vars(base).items():
            if callable(value) or name[:2] != "__":  # Python itself adds `__annotations__` once somebody asks for them
                yield id(value)

    for table in _TABLES:
        for functions in (table._global_mapping, table._local_mapping):
            yield from map(id, functions.values())

    yield from map(id, vars(functional).values())

    for name in {base.__module__ for base in bases}:
        file = vars(sys.modules[name]) if name in sys.modules else {}
        yield from (id(value) for value in file.values() if type(value) is FunctionType)
