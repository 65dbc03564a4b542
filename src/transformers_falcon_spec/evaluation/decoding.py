"""The named sampling options with which a measurement writes text."""

from typing import Any

from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from ..errors import OptionError
from ..generation.timed import Options

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
