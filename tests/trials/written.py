"""Both sides of a trial: the same request, made anew for each, written without and with a drafter, and all that was seen of it."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.tuning.test_tuned_text import Fickle
from tests.tiny import make_prompt
from tests.trials.call import Call
from tests.trials.extras import ARGUMENTS, CRITERIA, PROCESSORS, ListStreamer, Spy
from tests.trials.faults import FAULTS
from tests.trials.parts import drafter_of
from transformers_falcon_spec import GenerationStats, SpeculationConfig, collect_speculation
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.transformers_versions import CACHE

_COST_MODEL = "transformers_falcon_spec.generation.tuning.cost_model_of"


@dataclass
class Written:
    """What a caller sees of one call."""

    text: Tensor | None = None  # [rows, tokens], prompts included
    output: Any = None  # the dict, where one was asked for
    error: Exception | None = None
    state: Tensor = field(default_factory=torch.get_rng_state)
    cache: Any = None  # that was passed
    streamer: ListStreamer | None = None
    spy: Spy | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    seed: int = 0
    changed: list[str] = field(
        default_factory=list
    )  # things of the caller's, or of the models', that are not as before


def prompts(call: Call) -> tuple[Tensor, Tensor]:
    """Ids and mask of the prompts, padded on the left."""
    longest = max(call.lengths)
    ids, mask = torch.zeros(2, len(call.lengths), longest, dtype=torch.long)
    for row, length in enumerate(call.lengths):
        ids[row, -length:] = make_prompt(length, seed=1000 * call.seed + row)
        mask[row, -length:] = 1
        if call.padding == "holes":
            mask[row, -length + 1 + row % 2] = mask[row, -3] = 0
    return ids, mask


def plain(call: Call, target: Any, row: int | None = None, seed: int | None = None) -> Written:
    """Without a drafter; `row` alone if one is named."""
    return _write(call, target, None, row, call.seed if seed is None else seed)


def silent(call: Call, target: Any) -> Written:
    """With a drafter that drafts nothing."""
    drafter = RandomDrafter(proposals=0.0)
    drafter.generation_config = SpeculationConfig(tune=False, verifier=call.verifier)
    return _write(call, target, drafter, None, call.seed)


def drafted(call: Call, target: Any, gold: Tensor | None) -> Written:
    """With the call's drafter, which is given a part of the text `gold`."""
    try:
        drafter = inner = drafter_of(call, target)
    except Exception as error:  # noqa: BLE001  a drafter that cannot be made is a finding, too
        return Written(error=error)
    before = drafter_traces(inner)
    if call.hit_rate and gold is not None:
        ids, mask = prompts(call)
        num_new = ids.shape[1] - (call.num_cached if call.cache == "new" else 0)
        drafter = InformedDrafter(inner, gold, call.hit_rate, mask[:, -num_new:])
    known = Fickle(call.seed)
    with patch(_COST_MODEL, lambda *_: known if call.is_tuned else None), _broken(call, target):
        written = _write(call, target, drafter, None, call.seed)
    written.changed += [f"the drafter's {name}" for name in differing(before, drafter_traces(inner))]
    return written


def _broken(call: Call, target: Any) -> AbstractContextManager[Any]:
    if call.fault is None:
        return nullcontext()
    probe(target)  # which would find some faults itself, and then read no trees
    return FAULTS[call.fault].broken()


def _write(call: Call, target: Any, drafter: Any, row: int | None, seed: int) -> Written:
    """One call of `generate`, and what it leaves behind."""
    try:
        if call.threshold == "dynamic":  # which keeps the frequencies of the longest text until a short one is read
            target(torch.ones(1, 1, dtype=torch.long))
        request = _request(call, target, row)
    except Exception as error:  # noqa: BLE001  of Transformers alone: the text begins behind what it can read
        return Written(error=error, seed=seed)
    streamer, spy = ListStreamer() if call.streams else None, _spy(request)
    before, given = target_traces(target), _given(request)
    written = Written(cache=request.get(CACHE), streamer=streamer, spy=spy, seed=seed)
    torch.manual_seed(seed)
    with collect_speculation() as collected, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = target.generate(**request, streamer=streamer, assistant_model=drafter)
        except Exception as error:  # noqa: BLE001  whatever it is, the other side must do the same
            written.error = error
        else:
            written.text = found if isinstance(found, Tensor) else found.sequences
            written.output = None if isinstance(found, Tensor) else found
    written.state = torch.get_rng_state()
    written.stats = sum(collected, GenerationStats())
    written.changed += [f"the target's {name}" for name in differing(before, target_traces(target))]
    written.changed += [f"the argument `{name}`" for name in differing(given, _given(request))]
    return written


def _request(call: Call, target: Any, row: int | None) -> dict[str, Any]:
    """Arguments of `generate`, all of them new objects; those of one row alone if one is named."""
    ids, mask = prompts(call)
    request: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, **call.decoding}
    for name in call.extras:
        for key, value in _extra(name, ids, mask).items():
            request[key] = type(value)([*request.get(key, ()), *value]) if isinstance(value, list) else value
    rows = slice(None) if row is None else slice(row, row + 1)
    for name, value in request.items():
        if isinstance(value, Tensor) and len(value) > 1:
            request[name] = value[rows].clone()
    if call.cache is not None:
        request[CACHE] = _cache(call, target, ids[rows], request["attention_mask"])
    request["input_ids"] = ids[rows, call.num_cached if call.cache == "new" else 0 :].clone()
    return request | {f"output_{name}": True for name in call.outputs} | {"return_dict_in_generate": call.has_dict}


def _extra(name: str, ids: Tensor, mask: Tensor) -> dict[str, Any]:
    if name in ARGUMENTS:
        return ARGUMENTS[name](ids, mask)
    return (PROCESSORS | CRITERIA)[name]()


def _cache(call: Call, target: Any, ids: Tensor, mask: Tensor) -> DynamicCache:
    """The cache that the caller passes, filled by an earlier call if the call says so."""
    cache = DynamicCache() if call.cache == "bare" else DynamicCache(config=target.config)
    if call.num_cached:
        filled = slice(0, call.num_cached)
        target.generate(ids[:, filled], attention_mask=mask[:, filled], past_key_values=cache, max_new_tokens=1)
    return cache


def _spy(request: dict[str, Any]) -> Spy | None:
    return next((each for each in request.get("stopping_criteria", ()) if isinstance(each, Spy)), None)


def _given(request: dict[str, Any]) -> dict[str, Any]:
    """What nobody may change of the caller's arguments."""
    lists = {name: list(map(id, value)) for name, value in request.items() if isinstance(value, list)}
    return lists | {name: value.tolist() for name, value in request.items() if isinstance(value, Tensor)}


def target_traces(target: Any) -> dict[str, Any]:
    """What a call could leave behind on a target, and on this process."""
    return {
        "attributes": {name: sorted(vars(part)) for name, part in target.named_modules()},
        "training flags": [part.training for part in target.modules()],
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in target.modules()],
        "weights": [(weight.data_ptr(), weight._version, weight.requires_grad) for weight in target.parameters()],
        "configuration": repr(target.config.to_dict()),
        "generation configuration": repr(target.generation_config.to_dict()),
        "attention": target.config._attn_implementation,
        "classes": [type(part) for part in target.modules()],
        "process": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
    }


def drafter_traces(drafter: Any) -> dict[str, Any]:
    """What a call could leave behind on a drafter."""
    options = {"options": repr(drafter.generation_config.to_dict())}
    if not isinstance(drafter, torch.nn.Module):
        return options
    return options | {
        "classes": [type(part) for part in drafter.modules()],
        "training flags": [part.training for part in drafter.modules()],
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in drafter.modules()],
        "weights": [(weight.data_ptr(), weight._version, weight.requires_grad) for weight in drafter.parameters()],
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names under which the two differ."""
    return [name for name, value in before.items() if after[name] != value]
