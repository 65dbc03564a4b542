"""The promise: with any drafter the text is the one that the target writes alone, token for token, greedy and sampled.

In double precision ties do not occur, so equality is exact. Sampling runs draw from the same seed, with processors.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from tests import runs
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.pairs import in_turn
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree, SpeculationConfig

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "opt", "llama4", "bloom")
SHAPES = [(k, recurrence, layers) for k in (1, 2, 3, 4) for recurrence in ("sequence", "token") for layers in (1, 2)]
SWEEP = pytest.mark.families  # what a test tries beyond one case of each kind
CASES = [
    pytest.param(
        FAMILIES[case % len(FAMILIES)], *SHAPES[case % len(SHAPES)], case, marks=[] if case % 5 in (0, 3) else SWEEP
    )
    for case in range(len(SHAPES) * 2)
]
GREEDY: dict[str, Any] = {"do_sample": False}
MODES = {"greedy": GREEDY, "sampling": runs.SAMPLING}


def _random_tree(seed: int, num_nodes: int = 14) -> DraftTree:
    """A tree of any shape; now and then bushy at the root, so that even an untrained drafter has hits."""
    choose = random.Random(seed)
    reach = choose.choice([1, 3, num_nodes])
    parents = [-1] + [choose.randrange(max(node - reach, 0), node) for node in range(1, num_nodes)]
    return DraftTree.from_lists(parents)


@pytest.mark.parametrize(("family", "block_size", "recurrence", "num_layers", "case"), CASES)
def test_falcon_writes_the_targets_text(
    family: str, block_size: int, recurrence: str, num_layers: int, case: int
) -> None:
    target = make_target(family, seed=case).double()
    feature_layers = [[-1], [1, -1], [0, 2]][case % 3]
    max_depth = 14 if feature_layers == [-1] else block_size  # others draft one block only
    drafter = make_drafter(
        target,
        block_size=block_size,
        recurrence=recurrence,
        num_hidden_layers=num_layers,
        draft_tree=_random_tree(case).pruned(max_depth, num_nodes=14).to_json(),
        feature_layers=feature_layers,
    )

    pair = runs.informed(
        target, drafter, make_prompt(3 + case, case), seed=case, **MODES[["greedy", "sampling"][case // 16]]
    )

    pair.assert_equal()


@pytest.mark.parametrize(
    ("block_size", "family", "mode"),
    [
        *((2, "llama", mode) for mode in MODES),
        *(
            pytest.param(*shape, mode, marks=SWEEP)
            for shape, mode in in_turn(product((1, 2, 3), ("llama", "mistral", "gpt2")), MODES)
            if shape != (2, "llama")
        ),
    ],
)
def test_falcon_that_grows_its_trees_writes_the_targets_text(block_size: int, family: str, mode: str) -> None:
    target = make_target(family, seed=block_size).double()
    drafter = make_drafter(target, block_size=block_size)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, tree_depth=4, num_tree_nodes=24, tree_top_k=6)

    pair = runs.informed(target, drafter, make_prompt(5), **MODES[mode])

    pair.assert_equal()
    if mode == "greedy":
        batch_and_drafted(target, drafter).assert_equal()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [pytest.param(1, marks=SWEEP), 2, pytest.param(3, marks=SWEEP)])
def test_falcon_that_is_often_right_writes_the_targets_text(mode: str, block_size: int) -> None:
    target = make_target(seed=block_size).double()
    gold = runs.plain(target, max_new_tokens=30, **MODES[mode]).sequences
    drafter = make_drafter(target, block_size=block_size, draft_tree=_random_tree(4, num_nodes=20).to_json())

    pair = runs.both(target, InformedDrafter(drafter, gold), max_new_tokens=30, **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5


@pytest.mark.parametrize("seed", [0, 4, 7, *(pytest.param(seed, marks=SWEEP) for seed in (1, 2, 3, 5, 6))])
def test_sampling_follows_the_seed_whatever_the_tree(seed: int) -> None:
    target = make_target().double()
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    gold = runs.plain(target, seed=seed, **options).sequences
    drafter = InformedDrafter(RandomDrafter(num_nodes=2 + 3 * seed), gold, hit_rate=0.9)

    pair = runs.both(target, drafter, seed=seed, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.3


def _prefer_odd(_batch_id: int, text: torch.Tensor) -> list[int]:
    """A grammar of a kind: odd tokens after even ones, and the other way round."""
    return list(range(int(text[-1] + 1) % 2 + 2, 97, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"do_sample": True, "top_k": 5, "min_p": 0.05, "renormalize_logits": True},
        {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
        {"bad_words_ids": [[5], [8, 9]], "suppress_tokens": [7, 11], "sequence_bias": [[[13], 2.0]]},
        {"eos_token_id": list(range(3, 50)), "min_new_tokens": 9, "forced_eos_token_id": 4},
        {"eos_token_id": 96, "exponential_decay_length_penalty": (5, 1.3), "do_sample": True},
        {"prefix_allowed_tokens_fn": _prefer_odd, "do_sample": True},
        {"top_h": 0.4, "do_sample": True},
        {
            "begin_suppress_tokens": list(range(3, 40)),
            "encoder_no_repeat_ngram_size": 2,
            "remove_invalid_values": True,
        },
        {"min_length": 20, "eos_token_id": list(range(3, 50)), "forced_bos_token_id": 9},
        {"guidance_scale": 1.7, "do_sample": True},
        {"guidance_scale": 1.7, "do_sample": False},
        {"negative_prompt_ids": make_prompt(7, seed=5), "guidance_scale": 1.7, "do_sample": True},
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash"), "do_sample": True},
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash"), "do_sample": True},
        {
            "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, sampling_table_size=64),
            "do_sample": True,
        },
    ],
    ids=lambda options: next(name for name in options if name != "do_sample"),
)
def test_every_processor_works_as_in_plain_decoding(options: dict[str, Any]) -> None:
    target = make_target().double()
    gold = runs.plain(target, seed=3, **options).sequences

    # features are read, too: a processor that runs the target itself must not be heard by the drafter
    pair = runs.both(target, InformedDrafter(RandomDrafter(feature_layers=(0, 1, -1)), gold), seed=3, **options)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0


def test_the_features_under_guidance_are_those_of_the_text_alone() -> None:
    target, drafter = make_target().double(), RandomDrafter(feature_layers=(1, -1))
    options = {"guidance_scale": 1.7, "negative_prompt_ids": make_prompt(7, seed=5)}
    gold = runs.plain(target, **options).sequences

    runs.drafted(target, InformedDrafter(drafter, gold), **options)

    features = torch.cat([commit.features for commit in drafter.generators[0].commits], dim=1)
    with torch.no_grad():
        states = target(gold, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([states[1], states[-1]], dim=-1)[:, :-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "llama4", "falcon_alibi"])
@pytest.mark.parametrize("masked", [(0, 1, 2), (0, 4, 9)], ids=["left padding", "holes"])
def test_a_masked_prompt_is_read_as_in_plain_decoding(family: str, masked: tuple[int, ...]) -> None:
    target, mask = make_target(family).double(), torch.ones(1, 12, dtype=torch.long)
    mask[0, list(masked)] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, **runs.SAMPLING}
    gold = runs.plain(target, **options).sequences
    drafter = InformedDrafter(make_drafter(target, draft_tree=_random_tree(2).to_json()), gold, mask=mask)

    pair = runs.both(target, drafter, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_differs_at_ties_only(dtype: torch.dtype) -> None:
    target = make_target().to(dtype)
    gold = runs.plain(target, output_logits=True)

    out = runs.drafted(target, InformedDrafter(RandomDrafter(), gold.sequences), output_logits=True)

    ours, plain = out.sequences[0], gold.sequences[0]
    split = next((index for index in range(len(plain)) if ours[index] != plain[index]), None)
    if split is not None:
        ours, plain = out.logits[split - 12][0], gold.logits[split - 12][0]
        best, second = plain.topk(2).values
        assert best - second <= 4 * (ours - plain).abs().max()
    assert out.speculation.acceptance_length > 1
