"""Which call a seed stands for: a family, a drafter, a way of decoding and all that goes with them, drawn so that they fit together."""

import random
from dataclasses import replace
from typing import Any

from tests.families import HYBRIDS, RECURRENT
from tests.thresholds import INSTALLED_NEWER, SCALINGS, thresholds
from tests.trials.call import Call
from tests.trials.changes import CHANGES, OFFLOADS
from tests.trials.extras import CRITERIA, MAY_REMEMBER, PROCESSORS
from tests.trials.parts import DRAFTERS, DRAWING, GROWING, VERIFIED
from transformers_falcon_spec.generation.verifier import verifier_named
from transformers_falcon_spec.transformers_versions import INSTALLED

FIRST_CHANGED = 2_000  # from this seed on, something in the target is changed for the call
FIRST_AT_LENGTHS = 20_000  # from this seed on, texts are written near a length at which the target may change its ways
FIRST_NEWER = 30_000  # from this seed on, by targets that the oldest supported Transformers has not
_LENGTHS = (
    8,
    24,
    40,
    136,
)  # within what the probe reads, about its end, behind it, and behind the first that is audited
_DISTANCES = (-20, -9, -5, -3, -1, 0, 1, 2, 6, 15)  # of a prompt's end from that length
_EAGER = (
    "gptj",
    "codegen",
    "gemma2",
    "gemma2_narrow",
    "gpt_oss",
    "bloom",
    "gpt_neo",
    "mpt",
    "rembert",
    "mamba",
    "mamba2",
    "falcon_mamba",
)  # Transformers has no other
_INDEXED = ("deepseek_v32", "deepseek_v32_sparse", "minimax_m3")  # take no cache that was made without a configuration
# Llama 4 sends ids to where its embeddings lie; LongCat's router multiplies by a weight of its classifier, which stays away,
# so that even plain texts differ from call to call.
_NOT_OFFLOADED = ("llama4", "longcat_flash")
_TYPED = ("gpt2", "gptj", "codegen", "gpt_bigcode")  # families with `token_type_ids`
_DENSE = ("llama", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "olmo", "mistral", "gpt2", "opt", "gemma3", "smollm3")
_WARPERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.3, 0.7, 1.0, 1.3),
    "top_k": (0, 2, 5, 20),
    "top_p": (0.5, 0.9),
    "min_p": (0.05, 0.2),
    "typical_p": (0.8,),
    "epsilon_cutoff": (0.01,),
    "eta_cutoff": (0.01,),
    "top_h": (0.4,),
}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"encoder_repetition_penalty": 1.2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [8, 9], [11, 40]]},
    {"suppress_tokens": [7, 11, 12]},
    {"begin_suppress_tokens": list(range(3, 40))},
    {"sequence_bias": [[[13], 2.0], [[20, 21], -4.0]]},
    {"forced_bos_token_id": 9},
    {"guidance_scale": 1.7},
    {"remove_invalid_values": True},
    {"renormalize_logits": True},
    {"prefill_chunk_size": 4},
)
_ENDINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"min_new_tokens": 7},
    {"forced_eos_token_id": 4},
    {"exponential_decay_length_penalty": (4, 1.3)},
    {"pad_token_id": 2},
)


def draw(seed: int) -> Call:
    """The call of a seed."""
    rng = random.Random(seed)
    if seed >= FIRST_NEWER:
        return _at_length(rng, seed, INSTALLED_NEWER)
    if seed >= FIRST_AT_LENGTHS:
        return _at_length(rng, seed, VERIFIED)
    return _drawn(rng, seed)


def _at_length(rng: random.Random, seed: int, families: tuple[str, ...]) -> Call:
    """A call whose prompts end near a length that the target's config names; its layers may be offloaded."""
    length = rng.choice(_LENGTHS)
    kinds: dict[str, list[str]] = {}  # families by what changes at a length
    for family in families:
        for name in thresholds(family, length):
            kinds.setdefault(name, []).append(family)
    threshold = rng.choice(list(kinds))
    family = rng.choice(kinds[threshold])
    lengths = tuple(max(length + rng.choice(_DISTANCES), 1) for _ in range(rng.choice([1, 1, 1, 2, 3])))

    call = _drawn(rng, seed, family, lengths)
    # the batch decides, which rows alone do not know: by its longest text, or by slots, padding included
    if threshold in {*SCALINGS, "values", "blocks", "temperature"} and len(lengths) > 1:
        call = replace(call, decoding=call.decoding | {"do_sample": False})
    offload = rng.choice([None, None, *OFFLOADS])
    if family in _NOT_OFFLOADED:
        offload = None
    if family in INSTALLED_NEWER:  # MiniMax-M3 itself fails where positions say more than its cache holds
        call = replace(call, extras=tuple(name for name in call.extras if "positions" not in name))
    return replace(call, threshold=threshold, threshold_length=length, change=offload)


def _drawn(rng: random.Random, seed: int, family: str | None = None, lengths: tuple[int, ...] = ()) -> Call:
    """A call of any kind; the family and the prompts' lengths are drawn, too, where none are given."""
    is_likely = lambda share: rng.random() < share  # noqa: E731
    dtype = rng.choices(["float32", "float64", "bfloat16"], [16, 3, 2])[0]
    if family is None:
        family = rng.choice(_DENSE if dtype == "bfloat16" else (*VERIFIED, *_TYPED))
    elif family not in _DENSE and dtype == "bfloat16":
        dtype = "float32"
    drafter = rng.choice(list(DRAFTERS))
    decoding = _decoding(rng)
    speculation = _speculation(rng, drafter, bool(decoding.get("do_sample")))
    rule = verifier_named(speculation.get("verifier", "token_matching"))
    lengths = lengths or _lengths(rng, is_likely)
    if family == "deepseek_v32_sparse" and is_likely(0.9):
        lengths = lengths[:1]  # batches are refused where the index must choose
    padding = "holes" if is_likely(0.05) and min(lengths) > 4 else "left"
    is_padded = padding == "holes" or len(set(lengths)) > 1
    attention = "eager" if family in _EAGER or (is_likely(0.3) and not (dtype == "float64" and is_padded)) else "sdpa"
    if family == "doge" and is_padded and INSTALLED < (5, 24):  # whose sdpa sees what comes where nothing is padded
        attention = "eager"
    cache, num_cached = _cache(rng, family, lengths)
    extras = _extras(rng, family, cache, is_padded, speculation)
    call = Call(
        seed=seed,
        family=family,
        attention=attention,
        dtype=dtype,
        drafter=drafter,
        speculation=speculation,
        hit_rate=rng.choice([0.6, 0.8, 0.9, 1.0]) if not rule.needs_draft_probs and is_likely(0.9) else 0.0,
        is_training=is_likely(0.3),
        is_tuned=rule.keeps_seeded_text and is_likely(0.3),
        lengths=lengths,
        padding=padding,
        cache=cache,
        num_cached=num_cached,
        decoding=decoding,
        extras=extras,
        outputs=tuple(_outputs(rng, attention, extras, dtype)),
        has_dict=is_likely(0.75),
        streams=is_likely(0.25),
    )
    last = {"pack_weights": True} if is_likely(0.4) else {}
    if drafter in GROWING and is_likely(0.5):
        last["prompt_lookup_num_tokens"] = rng.choice([2, 10])
    return replace(call, speculation=speculation | last, change=_change(rng, call))


def _change(rng: random.Random, call: Call) -> str | None:
    """What is changed in the target in trials of changes."""
    if not FIRST_CHANGED <= call.seed < FIRST_AT_LENGTHS:
        return None
    left_out = {
        "a head quantised as it reads": len(call.lengths) > 1 or call.dtype != "float32",
        # whose functions all models of the process share, and diffusion drafters are tried when they are made
        "an attention that mixes tokens": call.attention != "sdpa" or call.drafter.startswith("diffu"),
    }
    return rng.choice([name for name in CHANGES if not left_out.get(name)])


def _decoding(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 3, 6, 9, 16, 16, 24, 24]), "do_sample": False}
    if rng.random() < 0.5:
        options["do_sample"] = True
        for name, values in _WARPERS.items():
            if rng.random() < (0.7 if name == "temperature" else 0.15):
                options[name] = rng.choice(values)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        options.update(rng.choice(_OPTIONS))
    if rng.random() < 0.35:
        options["eos_token_id"] = rng.sample(range(3, 97), rng.choice([1, 6, 12, 20]))
        options.update(rng.choice(_ENDINGS))
    return options


def _speculation(rng: random.Random, drafter: str, is_sampled: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if is_sampled and rng.random() < 0.3:
        options["verifier"] = rng.choice(
            ("recursive_rejection", "traversal", "gumbel") if drafter in DRAWING else ("gumbel",)
        )
    if drafter in GROWING and rng.random() < 0.5:
        options |= {"dynamic_tree": True, "num_tree_nodes": rng.choice([4, 9, 24])}
        options |= {"tree_depth": rng.choice([1, 3, 6]), "tree_top_k": rng.choice([2, 4, 7])}
    return options


def _lengths(rng: random.Random, is_likely: Any) -> tuple[int, ...]:
    num_rows = rng.choice([1, 1, 1, 1, 2, 3, 4])
    if is_likely(0.35):
        return (rng.choice([1, 2, 5, 9, 13]),) * num_rows
    return tuple(rng.choice([1, 2, 3, 5, 7, 9, 12, 14]) for _ in range(num_rows))


def _cache(rng: random.Random, family: str, lengths: tuple[int, ...]) -> tuple[str | None, int]:
    """Every row has something in a filled cache, and something to read."""
    if family not in HYBRIDS and family in RECURRENT:  # whose cache does not know how much it holds
        return None, 0
    kinds = [None, "empty", "whole", "new"] + ["bare"] * (family not in _INDEXED)
    kind = rng.choice(kinds + [None] * 9 + ["empty", "whole", "new"])
    room = range(max(lengths) - min(lengths) + 1, max(lengths))
    if kind not in {"whole", "new"}:
        return kind, 0
    return (kind, rng.choice(room)) if room else (None, 0)


def _extras(
    rng: random.Random, family: str, cache: str | None, is_padded: bool, speculation: dict[str, Any]
) -> tuple[str, ...]:
    judges_ahead = verifier_named(speculation.get("verifier", "token_matching")).needs_draft_probs
    names = []
    if rng.random() < 0.25:
        processors = [name for name in PROCESSORS if not (judges_ahead and name in MAY_REMEMBER)]
        names.append(rng.choice(processors))
    if rng.random() < 0.3:
        names.append(rng.choice(list(CRITERIA)))
    if rng.random() < 0.15:
        names.append("tilt")
    if family in _TYPED and cache in {None, "empty"} and rng.random() < 0.6:
        names.append(rng.choice(["token types", "token types that differ"]))
    if cache in {None, "empty"} and rng.random() < 0.1:
        names.append(rng.choice(["positions by mask"] if is_padded else ["positions", "shared positions"]))
    return tuple(names)


def _outputs(rng: random.Random, attention: str, extras: tuple[str, ...], dtype: str) -> list[str]:
    """Logits are raw with a drafter; without one a processor that writes in place writes into them, too.

    A watermark favours tokens by their order, which 16 bits may turn: scores then differ by the whole favour.
    """
    has_jumps = dtype == "bfloat16" and any(name.startswith("watermark") for name in extras)
    shares = {
        "scores": 0.0 if has_jumps else 0.3,
        "logits": 0.0 if "writes in place" in extras else 0.3,
        "hidden_states": 0.12,
        "attentions": 0.12 if attention == "eager" else 0.0,
    }
    return [name for name, share in shares.items() if rng.random() < share]
