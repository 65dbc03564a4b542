"""The methods and the decodings that a benchmark compares, as arguments of `generate`.

Stock methods run without this package.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.utils.import_utils import is_sklearn_available

from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..generation.options import SpeculationConfig
from ..generation.patch import without_patch
from ..generation.timed import Options, Run, timed_generate
from ..provenance import configs_digest, weights_fingerprint

Kind = Literal["target alone", "drafter", "stock assistant", "stock prompt lookup", "stock block diffusion"]
BASELINE = "target"  # the name of the method without a drafter
PROMPT_LOOKUP_TOKENS = 10  # Transformers' own default of its generator
_ASSISTANT_OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@dataclass(frozen=True)
class Method:
    """A way to write text.

    Example:

    ```python
    >>> method = prompt_lookup("prompt-lookup", num_tokens=3)
    >>> method.kind, dict(method.options), method.is_stock
    ('stock prompt lookup', {'prompt_lookup_num_tokens': 3}, True)

    ```
    """

    name: str
    kind: Kind  # `"drafter"` is one of this package
    assistant: PreTrainedModel | None = None  # the `assistant_model` of `generate`
    options: Mapping[str, Any] = field(default_factory=dict)  # other arguments of `generate`
    settings: Mapping[str, Any] | None = None  # what decides its drafts besides weights
    num_nodes: int | None = None  # most tokens that the target reads in a step, root included; None if it varies
    _given_options: list[GenerationConfig] = field(init=False, repr=False, default_factory=list)  # the assistant's own

    def __post_init__(self) -> None:
        if self.assistant is not None and hasattr(self.assistant, "generation_config"):  # a DFlash drafter has none
            self._given_options.append(copy.deepcopy(self.assistant.generation_config))

    @property
    def is_stock(self) -> bool:
        """Whether the method is Transformers' own, without code of this package."""
        return self.kind != "drafter"

    @property
    def drafts(self) -> bool:
        """Whether it drafts: all methods do but the target alone."""
        return self.kind != "target alone"

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate` for one run, with the assistant's options as they were when it was loaded.

        Stock assisted generation may change them (schedule `"heuristic"`); then runs would depend on those before.
        """
        for options in self._given_options:
            self.assistant.generation_config = copy.deepcopy(options)  # type: ignore[union-attr]  # it is theirs

        return {"assistant_model": self.assistant, **self.options}

    def run(self, target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, options: Options, seed: int) -> Run:
        """One timed call of `target.generate`."""
        with self.path(target):
            return timed_generate(target, input_ids, max_new_tokens, options, seed, **self.arguments())

    def path(self, target: PreTrainedModel) -> AbstractContextManager[None]:
        """A context for calls of `target.generate`, in which no code of this package runs if the method is stock."""
        return without_patch(target) if self.is_stock else nullcontext()

    def describe(self) -> dict[str, Any]:
        """The entry of the method in a results file."""
        return {
            "method": self.name,
            "kind": self.kind,
            "weights": None if self.assistant is None else weights_fingerprint(self.assistant),
            "options": dict(self.options),
            "settings": self.settings,
            "num_nodes": self.num_nodes,
        }

    def identity(self) -> str:
        """A digest of all that decides what the method writes; its name is left out."""
        described = self.describe()
        del described["method"]
        if self.assistant is not None:
            described["configs"] = configs_digest(self.assistant)
        return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8).hexdigest()


def target_alone() -> Method:
    """The method without a drafter, which all others are compared with."""
    return Method(BASELINE, "target alone", num_nodes=1)


def with_drafter(name: str, drafter: DrafterModel) -> Method:
    """A drafter of this package, as it is now: later changes of its options are undone before each run."""
    settings, num_nodes, capture = drafter.draft_settings, drafter.num_nodes, drafter.generation_config.capture
    if capture != SpeculationConfig().capture:
        settings = {**(settings or {}), "capture": capture}

    return Method(name, "drafter", drafter, settings=settings, num_nodes=num_nodes)


def with_options(drafter: Any, options: SpeculationConfig) -> Any:
    """A drafter of the same weights with other options."""
    changed = copy.copy(drafter)
    changed.generation_config = options
    return changed


def stock_assistant(name: str, assistant: PreTrainedModel) -> Method:
    """Stock assisted generation: `assistant` drafts a chain with the options of its own `generation_config`.

    Options that it leaves out are Transformers' defaults, which the settings name. With scikit-learn installed
    Transformers adapts the confidence threshold within a call; no call inherits it from another.
    """
    defaults = GenerationConfig._get_default_generation_params()
    settings: dict[str, Any] = {"adapts_threshold": is_sklearn_available()}
    for option in _ASSISTANT_OPTIONS:
        value = getattr(assistant.generation_config, option, None)
        settings[option] = defaults.get(option) if value is None else value

    return Method(name, "stock assistant", assistant=assistant, settings=settings)


def stock_dflash(name: str, assistant: PreTrainedModel) -> Method:
    """Stock block diffusion: a DFlash drafter fills in a block of masks, and its best tokens are a chain."""
    options = {"speculation_type": "dflash"}
    return Method(name, "stock block diffusion", assistant, options, num_nodes=assistant.config.block_size)


def prompt_lookup(name: str, num_tokens: int = PROMPT_LOOKUP_TOKENS) -> Method:
    """Stock prompt lookup: at most `num_tokens` tokens that followed the same tokens earlier in the text."""
    options = {"prompt_lookup_num_tokens": num_tokens}
    return Method(name, "stock prompt lookup", options=options, num_nodes=num_tokens + 1)


# Decodings: the named sampling options with which a measurement writes text

_SYNTH_ID: dict[str, Any] = {"keys": [654, 400, 836, 123, 340, 443, 597, 160], "ngram_len": 5}
DECODINGS: dict[str, Options] = {
    "greedy": {"do_sample": False},
    "temperature-0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "temperature-1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "temperature-0.7-top-p-0.9": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
    "repetition-penalty": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "temperature-1.5-min-p": {"do_sample": True, "temperature": 1.5, "min_p": 0.1, "top_k": 0},
    "top-k-50": {"do_sample": True, "top_k": 50},
    "typical-p-0.9": {"do_sample": True, "typical_p": 0.9, "top_k": 0},
    "top-h-0.4": {"do_sample": True, "top_h": 0.4, "top_k": 0},
    "epsilon-eta": {"do_sample": True, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3, "top_k": 0},
    "sampling-repetition-penalty": {"do_sample": True, "temperature": 0.8, "top_k": 0, "repetition_penalty": 1.2},
    "watermark": {"do_sample": True, "top_k": 0, "watermarking_config": WatermarkingConfig(bias=2.0)},
    "synth-id": {"do_sample": True, "top_k": 0, "watermarking_config": SynthIDTextWatermarkingConfig(**_SYNTH_ID)},
    "guidance-1.5": {"do_sample": True, "temperature": 0.7, "top_k": 0, "guidance_scale": 1.5},
}


def decoding_options(name: str) -> Options:
    """The options of a named decoding; an unknown name is an [`OptionError`]."""
    if name not in DECODINGS:
        raise OptionError(f"`decodings` must be some of {sorted(DECODINGS)}, but one is {name!r}.")

    return DECODINGS[name]


def repetition_rate(ids: list[int], num_tokens: int = 4) -> float:
    """Share of runs of `num_tokens` tokens that occurred before in the text; looping text flatters drafters."""
    runs = [tuple(ids[start : start + num_tokens]) for start in range(len(ids) - num_tokens + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
