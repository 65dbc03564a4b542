"""Every family across every length that its config names: a text goes on as the target alone writes it, one row and two."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import CHAINS, DRAFTED, FAMILIES, ONE_OF_EACH
from tests.thresholds import INSTALLED_NEWER, SCALINGS, STEADY, thresholds
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation import audit
from transformers_falcon_spec.generation.audit import _integers
from transformers_falcon_spec.transformers_versions import CACHE, FORGETS_DROPPED_TEXT, INSTALLED

LENGTH = 40  # more than the probe reads, less than what is audited: what is wrong behind it is seen in the text
NUM_BEFORE, NUM_NEW = 4, 8  # tokens of a text before the length, and in all
TABLES = ("gpt2", "gpt_bigcode", "opt", "gptj", "codegen", "gpt_neo", "mpt", "rembert")  # positions that end
# Transformers has these in one place for all families that turn positions, and each family names its length in the same fields.
SHARED = ("dynamic", "longrope", "positions")
DROPPING = ("phi3", "phimoe")  # their cache, to read the text anew behind the length
KEEPING_SCALE = ("phimoe", "ministral3")  # whose reading changes with the length however positions are scaled
# Families that are tried at each of these lengths; others at one of them, and with one row.
IN_FULL = {*ONE_OF_EACH, *TABLES, *DROPPING, *KEEPING_SCALE}
OVERFLOWING = (
    "gemma2",
    "gemma2_narrow",
    "mpt",
)  # in some versions padding makes their attention NaN in double precision
# Numbers in configs that are no numbers of tokens: of layers, of experts, of parts of a forward.
NO_LENGTHS = (
    r"LABEL_|chunk_size_feed_forward|pretraining_tp|no_rope_layer_interval|scale_emb|n_head|n_layer|n_ctx"
    r"|sliding_window_pattern|altup_|interleave_moe_layer_step|decoder_sparse_step|moe_topk|first_k_dense_replace"
    r"|mamba_d_|mamba_expand|(^|mamba_)chunk_size$|num_logits_to_keep|conv_kernel|^expand$|state_size"
    r"|model_max_length|cca_time|num_mem_blocks|d_rel|hc_count|number_of_conv_states|split_ngram_parts|ngram_size"
    r"|compress_ratio|layer_group_size|loop_num_passes|loop_layer_index"
    r"|n_group|topk_group|conv_L_cache|block_multiple_of|alibi_bias_max|attn_pdrop|expansion_ratio"
)


def _cases() -> list[Any]:
    cases = []
    for number, family in enumerate(DRAFTED):
        names = list(thresholds(family, LENGTH))
        shared = [name for name in names if name in SHARED]
        for name in names:
            if family == "deepseek_v32_sparse" and name != "index":
                continue  # whose own index is shorter
            is_slow = name in STEADY and family not in KEEPING_SCALE
            is_slow |= name in SHARED and family not in IN_FULL and name != shared[number % len(shared)]
            cases.append(pytest.param(family, name, marks=[pytest.mark.slow] if is_slow else []))
    cases += [(family, "blocks") for family in INSTALLED_NEWER]
    return cases


def _prompt(*lengths: int) -> tuple[Tensor, Tensor]:
    """Prompts and their mask."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = make_prompt(length, seed=row)
        mask[row, -length:] = 1
    return ids, mask


def _both(target: Any, *lengths: int) -> runs.Pair:
    """A few tokens for each prompt, without a drafter and with one that knows them."""
    ids, mask = _prompt(*lengths)
    options = {"attention_mask": mask, "max_new_tokens": NUM_NEW}
    target(ids[:, -1:])  # `dynamic` scaling keeps the frequencies of the longest text until it reads a short one
    plain = runs.plain(target, ids, **options)
    state = torch.get_rng_state()

    target(ids[:, -1:])
    drafter = InformedDrafter(RandomDrafter(12), plain.sequences, hit_rate=0.9, mask=mask)
    drafted = runs.drafted(target, drafter, ids, **options)
    return runs.Pair(plain, drafted, state, torch.get_rng_state())


@pytest.mark.parametrize(("family", "name"), _cases())
def test_texts_across_the_length_are_the_targets_own(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is kept wherever anything is drafted; where nothing is, a note says why, or the batch is refused."""
    is_found = (family, name) == ("gpt_neo", "window")  # no mask tells of it, so that the audit must find it
    if is_found:
        monkeypatch.setattr(audit, "FLOOR", 32)
    target = in_double(make_target(family, seed=7, **thresholds(family, LENGTH)[name]))
    ends = name == "positions" and family in TABLES
    limits_batches = ends or bool(_refusal(family, name))
    fault = _fault_of_transformers(target, name)
    if fault is not None:
        with pytest.raises(fault):
            _both(target, LENGTH - NUM_BEFORE)
        return

    alone = _both(target, LENGTH - NUM_NEW if ends else LENGTH - NUM_BEFORE)
    has_batches = name not in SHARED or family in IN_FULL
    pairs = [alone]
    if has_batches:
        before = LENGTH - 2 * NUM_NEW, LENGTH - NUM_NEW
        pairs.append(_both(target, *(before if limits_batches else (LENGTH - NUM_BEFORE, LENGTH + 2))))
    for pair in pairs:
        pair.assert_equal(is_kept=False)
        said = " ".join(pair.stats.notes)
        assert ("scores were wrong" in said) == is_found
        if is_found:
            continue
        overflows = family in OVERFLOWING and "the prompt overflowed in the target" in said
        keeps_in_step = name in {"temperature", "blocks"} or family in CHAINS or overflows
        is_plain = name == "values" or (keeps_in_step and pair is not alone)
        assert (pair.stats.num_accepted > 0) != is_plain
        assert not is_plain or "nothing is drafted" in said
    refusal = _refusal(family, name)
    if refusal and has_batches:
        with pytest.raises(GenerationError, match=refusal):
            _both(target, LENGTH - NUM_BEFORE, LENGTH - NUM_NEW)


COUNTING = [("doge", "values"), ("llama4", "temperature"), ("gpt_neo", "window"), ("deepseek_v32", "index")]
COUNTING += [("llama", "longrope"), ("llama", "dynamic"), ("gpt2", "positions")]
COUNTING += [] if FORGETS_DROPPED_TEXT else [("phi3", "longrope")]
COUNTING += [(family, "blocks") for family in INSTALLED_NEWER]


@pytest.mark.parametrize(("family", "name"), COUNTING)
def test_what_the_cache_of_the_caller_holds_counts(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_length` counts the tokens of `input_ids` alone, which may be fewer than those of the text."""
    monkeypatch.setattr(audit, "FLOOR", 32)
    target = in_double(make_target(family, seed=7, **thresholds(family, LENGTH)[name]))
    num_before = NUM_NEW if name == "positions" else NUM_BEFORE
    prompt = make_prompt(LENGTH - num_before)
    notes = []

    for num_cached in (0, LENGTH // 2):
        options = {"max_new_tokens": NUM_NEW, "attention_mask": torch.ones_like(prompt)}
        plain = runs.plain(target, prompt[:, num_cached:], **options | _filled(target, prompt[:, :num_cached]))
        drafter = InformedDrafter(RandomDrafter(12), plain.sequences, hit_rate=0.9)
        drafted = runs.drafted(
            target, drafter, prompt[:, num_cached:], **options | _filled(target, prompt[:, :num_cached])
        )
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        notes.append(drafted.speculation.notes)

    assert notes[1] == notes[0]


def _filled(target: Any, ids: Tensor) -> dict[str, Any]:
    """A cache that holds these tokens, and as many frequencies as after them; nothing for none."""
    target(make_prompt(1))
    cache = DynamicCache(config=target.config)
    if ids.shape[1]:
        target(ids, **{CACHE: cache})
    return {CACHE: cache}


def _fault_of_transformers(target: Any, name: str) -> type[Exception] | None:
    """What a text across the length raises where this version of Transformers loses it, or cannot write it alone."""
    drops_its_cache = target.config.model_type in DROPPING
    if drops_its_cache and name in SCALINGS and FORGETS_DROPPED_TEXT:
        return GenerationError
    kinds = target.config.get_text_config(decoder=True).rope_parameters if name == "longrope" else {}
    has_kinds_of_layers = any(isinstance(each, dict) for each in kinds.values())
    return UnboundLocalError if has_kinds_of_layers and INSTALLED < (5, 21) else None


def _refusal(family: str, name: str) -> str:
    """What is said of a batch that would pass the length; nothing where it may."""
    if name == "index":
        return "tokens that this target's index keeps"
    if name in {"dynamic", "longrope"} or (family == "phimoe" and name in SCALINGS):
        return "changes its rotary frequencies"
    return ""


@pytest.mark.parametrize("family", DRAFTED)
def test_every_number_of_tokens_that_a_config_names_is_one_of_these_lengths(family: str) -> None:
    row = FAMILIES[family]
    known = {name for fields in thresholds(family, LENGTH).values() for name, _ in _leaves(fields)}
    leaves = _leaves(getattr(transformers, row.config)(**row.fields).to_dict())

    named = {name for name, value in leaves if value and list(_integers({name: value}))}

    assert {name for name in named - known if not re.search(NO_LENGTHS, name)} == set()


def _leaves(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a config and of its parts."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(name), value
