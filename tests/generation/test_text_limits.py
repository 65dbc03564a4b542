"""Lengths at which a target reads otherwise: rotary frequencies switch, an attention index is full; the text stays the target's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests import reference, runs
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.test_ended_rows import ending
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.text_limits import scaled_context, switch_lengths
from transformers_falcon_spec.transformers_versions import FORGETS_DROPPED_TEXT

SWITCH = 24
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": SWITCH}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING}
ABOUT_THE_SWITCH = [
    (15, "sampling"),
    (23, "greedy"),
    (24, "sampling"),
    (24, "greedy"),
    (25, "greedy"),
    (30, "sampling"),
]
FAMILIES_THAT_SWITCH = ["llama"] if FORGETS_DROPPED_TEXT else ["llama", "phi3"]


def longrope(family: str, **changes: Any) -> PreTrainedModel:
    changes = {"max_position_embeddings": 96, "rope_parameters": dict(LONGROPE), **changes}
    if family == "phi3":
        changes["original_max_position_embeddings"] = SWITCH
    return in_double(make_target(family, seed=3, **changes))


def _assert_own_text(target: PreTrainedModel, drafter: Any, prompt: torch.Tensor, **options: Any) -> Any:
    gold = runs.plain(target, prompt, max_new_tokens=25, **options).sequences

    informed = InformedDrafter(drafter, gold, mask=options.get("attention_mask"))
    pair = runs.both(target, informed, prompt, max_new_tokens=25, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.3
    return pair


def test_one_forward_across_the_switch_reads_other_logits() -> None:
    model, prompt, parents = longrope("llama"), make_prompt(SWITCH - 2), [-1, 0, 1, 2]
    token_ids = make_prompt(4, seed=1)[0].tolist()

    logits = runs.tree_logits(runs.prefilled(model, prompt), token_ids, parents)

    error = (logits - reference.tree_logits(model, prompt, token_ids, parents)).abs().amax(-1)
    assert error[0] > 0.1  # the root too: it stands before the switch, but was read with what holds behind it


@pytest.mark.parametrize(("prompt_len", "mode"), ABOUT_THE_SWITCH)
def test_drafts_end_where_longrope_takes_other_frequencies(prompt_len: int, mode: str) -> None:
    _assert_own_text(longrope("llama"), RandomDrafter(), make_prompt(prompt_len), **MODES[mode])


@pytest.mark.parametrize("family", FAMILIES_THAT_SWITCH)
def test_padding_does_not_move_the_switch(family: str) -> None:
    mask = torch.ones(1, 15, dtype=torch.long)
    mask[0, :4] = 0

    _assert_own_text(longrope(family), RandomDrafter(), make_prompt(15), attention_mask=mask)


@pytest.mark.parametrize("family", FAMILIES_THAT_SWITCH)
def test_long_rows_make_short_ones_beside_them_be_read_as_they_are(family: str) -> None:
    ends = ending(ends=(3, 10), prompt_len=SWITCH + 6)  # the long row ends first

    batch_and_drafted(longrope(family), lengths=(SWITCH + 6, SWITCH - 14), **ends).assert_equal(is_kept=False)


if FORGETS_DROPPED_TEXT:  # Transformers before 5.20 reads the newest token alone at the switch, which is refused

    def test_a_text_that_transformers_forgets_on_its_way_is_refused() -> None:
        target = longrope("phi3")

        with pytest.raises(GenerationError, match=r"drops its cache at 24 tokens, .* the text may grow to 25"):
            runs.drafted(target, RandomDrafter(), make_prompt(15), max_new_tokens=10)

        for num_tokens, num_new in ((15, 9), (SWITCH + 1, 10)):  # before the length, and behind it
            assert (
                runs.both(target, RandomDrafter(), make_prompt(num_tokens), max_new_tokens=num_new).stats.num_drafted
                > 0
            )

else:

    @pytest.mark.parametrize(("prompt_len", "mode"), ABOUT_THE_SWITCH)
    def test_phi3_reads_its_text_anew_at_the_switch(prompt_len: int, mode: str) -> None:
        _assert_own_text(longrope("phi3"), RandomDrafter(), make_prompt(prompt_len), **MODES[mode])

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_phi3_with_a_window_reads_its_text_anew(attention: str) -> None:
        target = longrope("phi3", sliding_window=8, attn_implementation=attention)

        pair = _assert_own_text(target, RandomDrafter(), make_prompt(15))

        cache = pair.drafted.past_key_values
        assert cache.get_seq_length() == pair.plain.past_key_values.get_seq_length()
        assert [layer.keys.shape for layer in cache.layers] == [
            layer.keys.shape for layer in pair.plain.past_key_values.layers
        ]

    def test_a_cache_that_phi3_drops_is_its_owners_again() -> None:
        target = longrope("phi3", sliding_window=8)
        cache = DynamicCache(config=target.config)
        untouched = runs.traces(target, DynamicCache(config=target.config))

        out = runs.drafted(target, RandomDrafter(), make_prompt(15), past_key_values=cache)

        assert out.past_key_values is not cache
        assert runs.traces(target, cache) == untouched

    def test_the_second_reading_brings_the_drafter_no_features() -> None:
        target = longrope("phi3")
        drafter = RandomDrafter(feature_layers=(1, -1))

        _assert_own_text(target, drafter, make_prompt(15))

        commits = drafter.generators[-1].commits
        assert [commit.features.shape[1] for commit in commits] == [commit.num_new[0] for commit in commits]
        assert sum(commit.num_new[0] for commit in commits) == commits[-1].lengths[0] - 1

    def test_falcon_goes_on_drafting_after_the_switch() -> None:
        target = longrope("phi3")

        _assert_own_text(target, make_drafter(target), make_prompt(15))


SCALED: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SWITCH},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": SWITCH}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("prompt_len", "mode"),  # within, beyond, and beyond what scaling means
    [(12, "sampling"), (SWITCH + 1, "greedy"), (5 * SWITCH, "sampling")],
)
@pytest.mark.parametrize("scaling", SCALED)
def test_rotary_positions_have_no_end(scaling: str, prompt_len: int, mode: str) -> None:
    parameters = {"rope_theta": 1e4, **SCALED[scaling]}
    target = in_double(make_target(seed=3, max_position_embeddings=SWITCH, rope_parameters=parameters))

    pair = _assert_own_text(target, RandomDrafter(), make_prompt(prompt_len), **MODES[mode])

    assert pair.stats.notes == []


def test_falcon_drafts_beyond_the_positions_that_a_rotary_target_names() -> None:
    target = in_double(make_target(max_position_embeddings=SWITCH))

    _assert_own_text(target, make_drafter(target), make_prompt(2 * SWITCH))


def test_rows_of_a_batch_pass_the_positions_that_a_rotary_target_names() -> None:
    target, prompt = in_double(make_target(max_position_embeddings=SWITCH)), make_prompt(SWITCH - 8)

    _assert_own_text(target, RandomDrafter(), torch.cat([prompt, prompt.flip(1)]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt_len", [12, SWITCH + 1])
def test_dynamic_scaling_past_the_context_goes_on_in_plain_steps(prompt_len: int, mode: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 25, **MODES[mode]}
    prompt = make_prompt(prompt_len)
    target, other = (  # frequencies stay those of the longest text that was read
        in_double(make_target(seed=3, max_position_embeddings=SWITCH, rope_parameters=DYNAMIC)) for _ in range(2)
    )
    plain = runs.plain(other, prompt, **options)

    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(), plain.sequences), prompt, **options)

    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert (drafted.speculation.num_accepted > 0) == (prompt_len < SWITCH)
    assert f"positions for {SWITCH} tokens, or changes them" in " ".join(drafted.speculation.notes)


def test_rows_that_may_pass_dynamic_scaling_are_refused_before_anything_is_written() -> None:
    target = make_target(seed=3, max_position_embeddings=SWITCH, rope_parameters=DYNAMIC)
    prompt = torch.cat([make_prompt(), make_prompt(seed=1)])

    runs.informed(target, RandomDrafter(), prompt, max_new_tokens=SWITCH - 12).assert_equal()
    with pytest.raises(GenerationError, match=rf"changes its rotary frequencies at \[{SWITCH}\] tokens"):
        runs.drafted(target, RandomDrafter(), prompt, max_new_tokens=SWITCH)


NUM_POSITIONS = 40  # more than the probe reads
TABLES = {"gpt2": "n_positions", "opt": "max_position_embeddings", "gptj": "n_positions"}
TABLES |= {"codegen": "n_positions", "gpt_neo": "max_position_embeddings", "mpt": "max_seq_len"}


@pytest.mark.parametrize("family", TABLES)
def test_no_draft_passes_the_end_of_a_table_of_positions(family: str) -> None:
    target = in_double(make_target(family, seed=3, **{TABLES[family]: NUM_POSITIONS}))
    prompt = make_prompt(NUM_POSITIONS - 8)
    gold = runs.plain(target, prompt, max_new_tokens=8).sequences
    stop: list[Any] = [lambda ids, *_a, **_k: torch.tensor([ids.shape[1] >= NUM_POSITIONS])]
    options: dict[str, Any] = {"max_new_tokens": 30, "stopping_criteria": stop}  # it could have been longer

    pair = runs.both(target, InformedDrafter(RandomDrafter(12), gold), prompt, **options)

    pair.assert_equal()
    assert f"positions for {NUM_POSITIONS} tokens" in " ".join(pair.stats.notes)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **SCALED["linear"]}}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **SCALED["yarn"]}}, 4 * SWITCH),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 1e4, **SCALED["llama3"]}}, 512),
        ({"max_position_embeddings": 96, "rope_parameters": LONGROPE}, 96),
    ],
)
def test_the_context_is_as_long_as_the_scaling_means(changes: dict[str, Any], longest: int) -> None:
    assert scaled_context(make_target(**changes).config) == longest


def test_switches_are_found_in_parameters_by_kind_of_layer() -> None:
    by_kind = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

    assert switch_lengths(SimpleNamespace(rope_parameters=by_kind)) == [SWITCH]
    assert switch_lengths(SimpleNamespace(rope_parameters=LONGROPE)) == [SWITCH]
    assert switch_lengths(SimpleNamespace(rope_parameters=None)) == []


def sparse_target(index_topk: int) -> Any:
    return in_double(make_target("deepseek_v32_sparse", seed=7, index_topk=index_topk))


@pytest.mark.parametrize("seed", [0, 5000])
def test_ties_of_the_index_do_not_change_the_text(seed: int) -> None:
    target = sparse_target(16)

    pair = runs.informed(target, RandomDrafter(12), make_prompt(seed=seed), max_new_tokens=24)

    pair.assert_equal()
    assert "keeps 16 tokens of a text by an index" in " ".join(pair.stats.notes)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("holes", [[0, 1], [3, 9]])
def test_padding_turns_ties_of_the_index_as_it_does_in_plain_decoding(holes: list[int], seed: int) -> None:
    mask = torch.ones(1, 14, dtype=torch.long)
    mask[0, holes] = 0
    prompt = make_prompt(14, seed=seed)

    pair = runs.informed(sparse_target(16), RandomDrafter(12), prompt, attention_mask=mask, max_new_tokens=40)

    pair.assert_equal(is_kept=False)


def _choosing(seed: int) -> Any:
    """A Doge that keeps some of its tokens by their values."""
    target: Any = make_target("doge", seed=seed, keep_window_size=30)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in target.model.layers:  # zero until it is trained: all tokens alike
            layer.self_attn.A.copy_(torch.randn(layer.self_attn.A.shape, generator=generator))
    return target


@pytest.mark.parametrize("seed", range(2))
def test_what_an_attention_chooses_by_values_is_left_to_plain_decoding(seed: int) -> None:
    target = _choosing(seed)

    short = runs.informed(target, RandomDrafter(12), max_new_tokens=18)
    long = runs.informed(target, RandomDrafter(12), max_new_tokens=60)

    short.assert_equal()
    assert short.stats.notes == []
    long.assert_equal(is_kept=False)
    assert long.stats.num_drafted == 0
    assert "keeps 30 tokens of a text by their values" in " ".join(long.stats.notes)


@pytest.mark.parametrize("is_trained", [False, True])
def test_rows_that_end_change_nothing_of_what_others_choose_by_values(is_trained: bool) -> None:
    target = _choosing(0) if is_trained else make_target("doge", seed=0, keep_window_size=30)

    pair = batch_and_drafted(target, max_new_tokens=40, **ending(ends=(3, 40, 1, 30)))

    pair.assert_equal(is_kept=False)
    assert "the target chooses tokens by their values" in " ".join(pair.stats.notes)


def test_a_config_may_name_an_index_that_its_layers_have_not() -> None:
    target = make_target()
    target.config.index_topk, target.config.layer_types = 16, ["full_attention"] * 3  # as of Dots 3 without its index

    runs.informed(target, RandomDrafter(12), make_prompt(20)).assert_equal()


def test_drafting_ends_where_the_index_must_choose() -> None:
    short, long = (runs.informed(sparse_target(18), RandomDrafter(12), max_new_tokens=num).stats for num in (6, 24))

    assert short.notes == []
    assert short.num_steps < 5
    assert long.num_steps >= short.num_steps + 18  # each further token takes a step


def test_rows_that_may_outgrow_the_index_are_refused_before_anything_is_written() -> None:
    target, prompt = sparse_target(16), torch.cat([make_prompt(), make_prompt(seed=1)])

    runs.informed(target, RandomDrafter(12), prompt, max_new_tokens=4).assert_equal()
    with pytest.raises(
        GenerationError,
        match=r"at most the 16 tokens .* \(`index_topk`\), but they may grow to 20",
    ):
        runs.drafted(target, RandomDrafter(12), prompt, max_new_tokens=8)


@pytest.mark.parametrize("seed", [0, 5000])
def test_an_index_counts_tokens_and_not_the_positions_that_the_user_gives(seed: int) -> None:
    target, prompt = sparse_target(16), make_prompt(seed=seed)
    positions = torch.arange(prompt.shape[1])[None]
    near, far = (positions - prompt.shape[1] + 1).clamp(min=0), 3 * positions  # the newest at 0, and behind 16

    past = runs.informed(target, RandomDrafter(12), prompt, max_new_tokens=24, position_ids=near)
    within = runs.informed(target, RandomDrafter(12), prompt, max_new_tokens=4, position_ids=far)

    past.assert_equal(is_kept=False)
    within.assert_equal(is_kept=False)
    assert past.stats.num_steps >= 24 - 16 + prompt.shape[1]
    assert within.stats.num_drafted > 0
