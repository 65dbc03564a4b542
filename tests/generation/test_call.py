"""Calls that speculative decoding cannot serve: each is refused in words that say what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec import (
    FalconSpecDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    SpeculationConfig,
    disable,
    enable,
)
from transformers_falcon_spec.errors import (
    DrafterMismatchError,
    DraftTreeError,
    FalconSpecError,
    GenerationError,
    OptionError,
    PatchError,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_beams": 2},
            r"but `num_beams` is 2: Transformers would search beams and ignore the drafter\. Set `num_beams=1`",
        ),
        ({"dola_layers": "low"}, "`dola_layers` chooses tokens by contrasting layers"),
        ({"use_cache": False}, "`use_cache` must be True, but it is False, by the call or by"),
        ({"synced_gpus": True}, r"`synced_gpus` is not supported with a drafter\."),
        ({"assistant_ensemble_weight": 0.5}, r"`assistant_ensemble_weight` mixes the drafter into the text"),
        (
            {"use_mtp": True},
            r"beside `assistant_model` it has `use_mtp`, by which Transformers .*Leave out one of them",
        ),
        ({"assistant_early_exit": 1}, r"beside `assistant_model` it has `assistant_early_exit`"),
    ],
)
def test_options_that_do_not_go_with_a_drafter_are_refused(options: dict[str, Any], message: str) -> None:
    target = make_target(attn_implementation="eager")

    with pytest.raises(GenerationError, match=message):
        runs.drafted(target, RandomDrafter(), **options)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("num_cached", [0, 5])
def test_a_static_cache_is_served_and_a_dynamic_one_comes_back(num_cached: int, capture: bool) -> None:
    target = in_double(make_target())
    drafter = make_drafter(target)
    drafter.generation_config.capture = capture
    cache = StaticCache(config=target.config, max_cache_len=64)
    prompt, options = make_prompt(), {"attention_mask": torch.ones(1, 12, dtype=torch.long)}
    plain = runs.plain(target, prompt, max_new_tokens=30, **options).sequences
    if num_cached:
        with torch.no_grad():
            target(prompt[:, :num_cached], past_key_values=cache)

    drafted = runs.drafted(target, drafter, prompt, max_new_tokens=20, past_key_values=cache, **options)
    mask = torch.ones_like(drafted.sequences)
    more = runs.plain(
        target, drafted.sequences, max_new_tokens=10, past_key_values=drafted.past_key_values, attention_mask=mask
    )

    assert type(drafted.past_key_values) is DynamicCache
    assert drafted.sequences.tolist() == plain[:, :32].tolist()
    assert more.sequences.tolist() == plain.tolist()


def test_cache_implementation_static_is_served() -> None:
    target = in_double(make_target())

    pair = runs.both(target, make_drafter(target), cache_implementation="static")

    pair.assert_equal(is_kept=False)


def test_a_filled_static_cache_of_windows_is_refused() -> None:
    target = make_target("gemma3")
    cache = StaticCache(config=target.config, max_cache_len=64)
    with torch.no_grad():
        target(make_prompt()[:, :5], past_key_values=cache)

    with pytest.raises(GenerationError, match=r"`StaticCache` with sliding layers, filled with 5 tokens"):
        runs.drafted(target, RandomDrafter(), past_key_values=cache)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(GenerationError, match="needs the prompt's token ids, but there are none"):
        runs.drafted(make_target(), RandomDrafter(), torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize("ids", [{}, {"input_ids": make_prompt()}])
def test_embeddings_are_refused_with_ids_and_without(ids: dict[str, torch.Tensor]) -> None:
    target = make_target()
    embeddings = target.get_input_embeddings()(make_prompt())

    with pytest.raises(GenerationError, match=r"or `inputs_embeds` in their place\. Pass `input_ids` with at least"):
        target.generate(**ids, inputs_embeds=embeddings, assistant_model=RandomDrafter(), max_new_tokens=3)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "gpt_neo"])
def test_a_prompt_longer_than_a_table_of_positions_is_refused(family: str) -> None:
    field = "n_positions" if family in ("gpt2", "gptj") else "max_position_embeddings"
    target = make_target(family, **{field: 40})

    message = r"must fit the target's context of 40 tokens, but it has 41\. Shorten it, or load a target with a longer context\."
    with pytest.raises(GenerationError, match=message):
        runs.drafted(target, RandomDrafter(), make_prompt(41), max_new_tokens=3)


def test_an_encoder_decoder_target_is_refused() -> None:
    config = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config)

    with pytest.raises(GenerationError, match="`T5ForConditionalGeneration` has an encoder"):
        runs.drafted(target, RandomDrafter())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 101}, "a vocabulary of size 97, but the target `.*` gives 101"),
        ({"hidden_size": 32}, "features of size 64, but the target `.*` gives 32"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, int], message: str) -> None:
    drafter = make_drafter(make_target(), target_name_or_path="people/other")
    target = make_target(**changes)

    with pytest.raises(DrafterMismatchError, match=f"This drafter expects {message}.*: `people/other`"):
        runs.drafted(target, drafter)


@pytest.mark.parametrize("make", [make_drafter, LookaheadDrafter.from_target], ids=["falcon", "lookahead"])
def test_models_without_a_name_are_called_by_their_class(make: Any) -> None:
    drafter = make(make_target(vocab_size=101))

    message = r"of size 101, but the target `LlamaForCausalLM` gives 97\. Load the .*: a target without a name"
    with pytest.raises(DrafterMismatchError, match=message):
        runs.drafted(make_target(), drafter)


@pytest.mark.parametrize(
    ("assistant", "message"),
    [
        (
            "people/drafter",
            r"a model that is loaded, but it is the name or path 'people/drafter'\. Load it first: .*load_drafter\(NAME, target\)",
        ),
        (
            Path("people") / "drafter",
            r"a model that is loaded, but it is the name or path 'people/drafter'\. Load it first",
        ),
        (
            FalconSpecDrafter,
            r"a model, but it is the class `FalconSpecDrafter`\. Make one: `FalconSpecDrafter\.from_pretr",
        ),
        (LlamaForCausalLM, r"a model, but it is the class `LlamaForCausalLM`\. Make one"),
    ],
    ids=["name", "path", "class of drafters", "class of models"],
)
def test_what_is_no_model_is_refused_as_an_assistant(assistant: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=f"`assistant_model` must be {message}"):
        runs.drafted(make_target(), assistant)


def test_options_of_another_class_are_refused() -> None:
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config = GenerationConfig()

    message = r"must be a `SpeculationConfig`, but that of this `Falcon\w+` is a `GenerationConfig`\. Set `drafter"
    with pytest.raises(OptionError, match=message):
        runs.drafted(target, drafter)


def test_a_target_that_gives_tuples_is_refused() -> None:
    target = make_target()
    target.config.return_dict = False

    with pytest.raises(
        GenerationError, match=r"`return_dict` of its config must be True, but it is False\. Set `target"
    ):
        runs.drafted(target, RandomDrafter())


def test_a_drafter_says_that_the_patch_is_off() -> None:
    target = make_target()
    drafter = make_drafter(target)
    disable()
    try:
        with pytest.raises(
            PatchError, match=r"after `disable\(\)`\. Call `transformers_falcon_spec\.enable\(\)`, or `attach"
        ):
            runs.drafted(target, drafter)
    finally:
        enable()

    runs.informed(target, drafter).assert_equal()


def test_a_drafter_writes_no_text_by_itself() -> None:
    with pytest.raises(
        PatchError, match=r"must be asked for drafts .*, but it was asked for text, .*assistant_model=drafter"
    ):
        make_drafter(make_target()).generate(make_prompt())


def test_a_tree_with_a_node_before_its_parent_is_refused_where_it_is_written() -> None:
    tree = {"parents": [-1, 2, 0], "ranks": [-1, 0, 0]}

    with pytest.raises(DraftTreeError, match=r"Node 1 must come after its parent, but its parent is 2\."):
        make_drafter(make_target(), draft_tree=tree)


def test_a_refused_call_leaves_the_target_usable() -> None:
    target = make_target()
    with pytest.raises(GenerationError):
        runs.drafted(target, RandomDrafter(), num_beams=2)

    pair = runs.informed(target, RandomDrafter())

    pair.assert_equal()


@pytest.mark.parametrize("error", [DraftTreeError, OptionError, GenerationError, DrafterMismatchError])
def test_refusals_share_a_base_and_are_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, FalconSpecError)
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("kind", [LookaheadDrafter, MedusaDrafter])
def test_trees_are_not_asked_to_grow_where_they_cannot(kind: Any) -> None:
    target = make_target()
    drafter = kind.from_target(target)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True)

    with pytest.raises(
        OptionError, match=f"A `{kind.__name__}` grows no trees, so `dynamic_tree` must be None or False"
    ):
        target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4)
