"""Thousands of `generate` calls of mixed options in one process: does memory grow, and is anything left behind?

Command: python benchmarks/soak.py
Hardware and time: two CPU cores, about ten minutes for 2,000 calls. Each call draws its options: decoding, verifier, processors,
streamer, outputs, stopping, a cache to go on from, a batch, a thread; one in twelve is broken off by an exception of a criterion, a
processor or a streamer. `--alone` makes the same calls without the drafter, to tell a leak of ours from one below.
Writes `benchmarks/results/soak.json`.
"""

import argparse
import gc
import json
import random
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

import numpy
import psutil
import torch
from tqdm.auto import tqdm
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    WatermarkingConfig,
    logging,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation.streamers import BaseStreamer

from transformers_falcon_spec import GenerationStats, collect_speculation
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.generation.options import VERIFIERS
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
SYNTHID = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, sampling_table_size=256)
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [8, 9]]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda _row, text: list(range(int(text[-1]) % 2 + 8, 4096, 2))},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "guidance": {"guidance_scale": 1.3},
    "synthid": {"watermarking_config": SYNTHID},
}
WITH_MEMORY = ("guidance", "synthid")  # traversal refuses these, and processors from outside Transformers
IN_ORDER = tuple(verifier for verifier in VERIFIERS if verifier != "traversal")
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "warpers": {"do_sample": True, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
}
EXTRAS = {  # with the share of calls that ask for them
    "dict": 0.4,
    "hidden states": 0.2,
    "stop string": 0.2,
    "iterator": 0.2,
    "chunks": 0.1,
    "own cache": 0.1,
    "end tokens": 0.2,
}
INTERRUPTIONS = ("criterion", "processor", "streamer")
SHARES = {"thread": 0.1, "batch": 0.2, "broken off": 1 / 12, "next turn": 0.3, "negative prompt": 0.5}
NOTHING_LEFT = ("hooks", "threads", "recording_layers")


class BrokenOffError(Exception):
    """What an interrupted call raises."""


class Countdown:
    """Raises when it is asked for the `last` time."""

    def __init__(self, last: int) -> None:
        self.left = last

    def count(self) -> None:
        """One more."""
        self.left -= 1
        if self.left <= 0:
            raise BrokenOffError


class RaisingCriterion(Countdown):
    """Goes on, until it raises."""

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        """Asked once for each token."""
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingProcessor(Countdown):
    """Changes nothing, until it raises."""

    def __call__(self, _input_ids: Any, scores: Any) -> Any:
        """Asked once for each token."""
        self.count()
        return scores


class RaisingStreamer(Countdown, BaseStreamer):
    """Hears, until it raises."""

    def put(self, _value: Any) -> None:
        """The prompt, then each token."""
        self.count()

    def end(self) -> None:
        """Nothing."""


class Soak:
    """The calls: each draws its options from a seed of its own, so that every run makes the same ones."""

    def __init__(self, target: PreTrainedModel, drafter: Any, tokenizer: Any, prompts: list[torch.Tensor]) -> None:
        self.target, self.drafter, self.tokenizer, self.prompts = target, drafter, tokenizer, prompts
        self.counts: Counter[str] = Counter()
        self.stats = GenerationStats()
        self.cache: Any = None  # of an earlier call, to go on from, with its text

    def call(self, number: int) -> None:
        """The call of this number, in a thread of its own now and then."""
        rng = random.Random(number)
        if rng.random() < SHARES["thread"]:
            self.counts["in a thread"] += 1
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._call, rng, number).result()
        else:
            self._call(rng, number)

    def _call(self, rng: random.Random, number: int) -> None:
        torch.manual_seed(number)
        interruption = rng.choice(INTERRUPTIONS) if rng.random() < SHARES["broken off"] else None
        prompt, options = self._options(rng, interruption)
        if interruption:
            options |= _interrupting(interruption, rng.randint(1, 6))
        self.counts["calls"] += 1
        try:
            with collect_speculation() as collected:
                out = self.target.generate(prompt, assistant_model=self.drafter, **options)
        except BrokenOffError:
            self.counts[f"broken off by a {interruption}"] += 1
            return
        iterator = options.get("streamer")
        self.stats = sum(collected, self.stats)
        is_dict = options.get("return_dict_in_generate", False)
        self.cache = (out.past_key_values, out.sequences) if is_dict and rng.random() < SHARES["next turn"] else None
        if isinstance(iterator, TextIteratorStreamer):
            _drain(iterator)

    def _options(self, rng: random.Random, interruption: str | None) -> tuple[torch.Tensor, dict[str, Any]]:
        """A prompt and what `generate` is asked for; an own processor counts as one with a memory."""
        decoding, processors = rng.choice(list(DECODINGS)), rng.choice(list(PROCESSORS))
        is_memoryless = processors not in WITH_MEMORY and interruption != "processor"
        verifier = rng.choice(VERIFIERS if is_memoryless else IN_ORDER)
        if self.drafter is not None:
            self.drafter.generation_config.verifier = verifier
        options = {"max_new_tokens": rng.randint(4, 16), **DECODINGS[decoding], **PROCESSORS[processors]}
        if processors == "guidance" and rng.random() < SHARES["negative prompt"]:
            options["negative_prompt_ids"] = rng.choice(self.prompts)[:, :8]
        extras = [name for name, chance in EXTRAS.items() if rng.random() < chance]
        for name in extras:
            options |= self._extra(name)
        prompt = rng.choice(self.prompts)[:, : rng.randint(2, 48)]
        streams = "iterator" in extras or interruption == "streamer"
        if self.cache is not None and "chunks" not in extras and not (streams and len(self.cache[1]) > 1):
            options["past_key_values"], text = self.cache  # the next turn of a conversation
            prompt = torch.cat([text, prompt.repeat(len(text), 1)], dim=-1)
            self.counts["next turn"] += 1
        elif not streams and "own cache" not in extras and rng.random() < SHARES["batch"]:
            rows = [rng.choice(self.prompts)[:, : prompt.shape[1]] for _ in range(rng.randint(1, 3))]
            prompt = torch.cat([prompt, *(row for row in rows if row.shape == prompt.shape)])
            self.counts["batch"] += len(prompt) > 1
        if len(prompt) > 1:
            options.pop("negative_prompt_ids", None)  # of one row
        self.cache = None
        self.counts.update([decoding, processors, verifier, *extras])
        return prompt, options

    def _extra(self, name: str) -> dict[str, Any]:
        return {
            "dict": lambda: {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
            "hidden states": lambda: {"return_dict_in_generate": True, "output_hidden_states": True},
            "stop string": lambda: {"stop_strings": ["the", "."], "tokenizer": self.tokenizer},
            "iterator": lambda: {"streamer": TextIteratorStreamer(self.tokenizer, timeout=1)},
            "chunks": lambda: {"prefill_chunk_size": 7},
            "own cache": lambda: {"past_key_values": DynamicCache(config=self.target.config)},
            "end tokens": lambda: {"eos_token_id": list(range(2, 400, 3))},
        }[name]()


def _interrupting(name: str, last: int) -> dict[str, Any]:
    return {
        "criterion": {"stopping_criteria": StoppingCriteriaList([RaisingCriterion(last)])},
        "processor": {"logits_processor": LogitsProcessorList([RaisingProcessor(last)])},
        "streamer": {"streamer": RaisingStreamer(last)},
    }[name]


def _drain(streamer: TextIteratorStreamer) -> None:
    try:
        for _ in streamer:
            pass
    except Empty as error:
        raise RuntimeError("The streamer was never told that the text is complete.") from error


def traces(target: PreTrainedModel) -> dict[str, Any]:
    """What is held now: memory, tensors, hooks, threads."""
    gc.collect()
    objects = gc.get_objects()
    parts = list(target.modules())
    layers = [held for held in objects if issubclass(type(held), CacheLayerMixin)]
    return {
        "resident_bytes": psutil.Process().memory_info().rss,
        "num_tensors": sum(issubclass(type(held), torch.Tensor) for held in objects),
        "num_objects": len(objects),
        "hooks": sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts),
        "threads": threading.active_count(),
        "recording_layers": sum(getattr(layer, "record_past", False) for layer in layers),
        "attention": target.config._attn_implementation,
    }


def growth(points: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Slope of a straight line through the second half of the points, a thousand calls, with its 95 % interval.

    Neighbouring points are alike, so that the usual interval would be too narrow: it is widened by their correlation.
    """
    half = points[len(points) // 2 :]
    calls, values = (numpy.array([point[key] for point in half], dtype=float) for key in ("calls", name))
    centred = calls - calls.mean()
    slope = (centred * values).sum() / (centred**2).sum()
    left = values - values.mean() - slope * centred
    error = numpy.sqrt((left**2).sum() / (len(half) - 2) / (centred**2).sum())
    alike = max(float((left[1:] * left[:-1]).sum() / max((left**2).sum(), 1e-9)), 0.0)
    margin = 2.1 * error * numpy.sqrt((1 + alike) / (1 - alike))  # Student's factor at about 18 degrees of freedom
    return {
        "per_thousand_calls": 1000 * float(slope),
        "interval": [1000 * float(slope - margin), 1000 * float(slope + margin)],
        "autocorrelation": alike,
    }


def soak(run: Soak, num_calls: int, every: int) -> dict[str, Any]:
    """Make the calls; what is held at every checkpoint, how it grows, and what is left at the end."""
    # Transformers puts hooks of its own on a model that was ever asked for hidden states, and leaves them there
    run.target.generate(run.prompts[0], max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)
    before, points = traces(run.target), []
    for number in tqdm(range(num_calls), desc="calls"):
        run.call(number)
        if (number + 1) % every == 0:
            run.cache = None
            points.append({"calls": number + 1, **traces(run.target)})
    return {
        "before": before,
        "growth": {name: growth(points, name) for name in ("resident_bytes", "num_tensors", "num_objects")},
        "left_behind": {name: points[-1][name] - before[name] for name in NOTHING_LEFT},
        "attention": {"before": before["attention"], "after": points[-1]["attention"]},
        "counts": dict(run.counts),
        "acceptance_length": run.stats.acceptance_length,
        "points": points,
    }


def main() -> None:
    """Soak the embedded pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="calls between two checkpoints")
    parser.add_argument("--alone", action="store_true", help="leave out the drafter")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "soak.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    target, tokenizer = load_target(args.target, "float32", "cpu")
    drafter = None if args.alone else load_drafter(args.drafter, target)
    prompts = [prompt.input_ids(tokenizer) for prompt in read_prompts([args.prompts])]
    result = soak(Soak(target, drafter, tokenizer, prompts), args.calls, args.every)
    settings = {name: str(value) for name, value in vars(args).items()}
    args.output.write_text(
        json.dumps({"provenance": provenance(seed=0, **settings), **result}, indent=1) + "\n", encoding="utf-8"
    )
    grown = result["growth"]["resident_bytes"]
    low, high = (bound / 2**20 for bound in grown["interval"])
    print(f"{grown['per_thousand_calls'] / 2**20:.2f} MiB a thousand calls ({low:.2f} to {high:.2f})")
    print({name: result[name] for name in ("left_behind", "attention", "acceptance_length", "counts")})


if __name__ == "__main__":
    main()
