"""Bad input: what speculative decoding cannot serve is said in its own words, and the model is left as it was."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import AttentionInterface, DynamicCache, SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.errors import GenerationError, OptionError


class Changed(LogitsProcessor):
    """Returns what a function makes of the scores, from the `start`-th call on."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], start: int = 5) -> None:
        self.change, self.start, self.num_calls = change, start, 0

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return scores if self.num_calls < self.start else self.change(scores)


def changed(change: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Changed(change)]), **options}


def drawing_drafter(target: Any, verifier: str) -> Any:
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(verifier=verifier)
    return drafter


def one_nan(scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(-1, torch.tensor([7]), torch.nan)


BROKEN_SCORES = {
    "nan": one_nan,
    "infinite": lambda scores: scores.index_fill(-1, torch.tensor([7]), torch.inf),
    "all forbidden": lambda scores: torch.full_like(scores, -torch.inf),
}


@pytest.mark.parametrize("start", [1, 5])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_processor_that_returns_another_shape_is_refused(family: str, start: int) -> None:
    target = make_target(family)
    cache, before = DynamicCache(config=target.config), runs.traces(target, DynamicCache(config=target.config))
    narrow = LogitsProcessorList([Changed(lambda scores: scores[:, 1:], start)])

    with pytest.raises(GenerationError, match=r"must return scores of shape \(1, 97\), but one returned \(1, 96\)"):
        runs.drafted(target, RandomDrafter(feature_layers=(-1,)), past_key_values=cache, logits_processor=narrow)

    assert runs.traces(target, cache) == before
    runs.informed(target, RandomDrafter()).assert_equal()


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel"])
@pytest.mark.parametrize("kind", BROKEN_SCORES)
def test_scores_that_nothing_can_be_drawn_from_are_refused_where_plain_decoding_fails(
    kind: str, verifier: str
) -> None:
    target = make_target("gemma3")
    cache, before = DynamicCache(config=target.config), runs.traces(target, DynamicCache(config=target.config))
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        runs.plain(target, **changed(BROKEN_SCORES[kind], do_sample=True, top_k=0))

    message = r"Sampling needs a finite best score, but after the logits processors it is (nan|inf|-inf)\. Look for"
    with pytest.raises(GenerationError, match=message):
        runs.drafted(
            target,
            drawing_drafter(target, verifier),
            past_key_values=cache,
            **changed(BROKEN_SCORES[kind], do_sample=True, top_k=0),
        )

    assert runs.traces(target, cache) == before
    runs.informed(target, RandomDrafter()).assert_equal()


@pytest.mark.parametrize("kind", BROKEN_SCORES)
def test_greedy_decoding_takes_of_broken_scores_what_plain_decoding_takes(kind: str) -> None:
    target = make_target().double()
    gold = runs.plain(target, **changed(BROKEN_SCORES[kind]))

    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(), gold.sequences), **changed(BROKEN_SCORES[kind]))

    assert drafted.sequences.tolist() == gold.sequences.tolist()
    assert drafted.speculation.num_accepted > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"guidance_scale": 1.5}, r"UnbatchedClassifierFreeGuidanceLogitsProcessor` remembers"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5], ngram_len=3, sampling_table_size=64)},
            r"SynthIDTextWatermarkLogitsProcessor` remembers",
        ),
        (changed(lambda scores: scores), r"test_bad_input\.Changed` may remember"),
    ],
    ids=["guidance", "synthid", "foreign"],
)
def test_traversal_refuses_processors_with_a_memory(options: dict[str, Any], name: str) -> None:
    target = make_target()

    with pytest.raises(
        OptionError,
        match=rf'`verifier="traversal"` is not registered with `asks_in_order=True`.*{name} its calls\. Set',
    ):
        runs.drafted(target, drawing_drafter(target, "traversal"), do_sample=True, **options)

    runs.drafted(target, drawing_drafter(target, "traversal"), do_sample=False, **options)  # greedy decoding walks
    runs.informed(target, RandomDrafter()).assert_equal()


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel", "recursive_rejection"])
def test_all_other_rules_call_processors_once_for_each_token_in_order(verifier: str) -> None:
    target, texts = make_target(), []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            texts.append(input_ids[0].tolist())
            return scores

    options = {"do_sample": True, "temperature": 0.5, "logits_processor": LogitsProcessorList([Spy()])}
    out = runs.drafted(target, drawing_drafter(target, verifier), max_new_tokens=60, **options)

    text = out.sequences[0].tolist()
    assert texts == [text[:length] for length in range(12, len(text))]
    assert out.speculation.num_accepted > 0


def test_a_drafter_without_weights_is_refused() -> None:
    target = make_target()
    before, drafter = runs.traces(target), make_drafter(target).to("meta")

    message = r"must be on the target's device, `cpu`, but it is on `meta`\. Load its weights\."
    with pytest.raises(GenerationError, match=message):
        runs.drafted(target, drafter)

    assert runs.traces(target) == before


def test_a_decoding_function_of_the_callers_which_gets_no_drafter_is_refused() -> None:
    target = make_target()

    with pytest.raises(GenerationError, match=r"`custom_generate` is a function, .*: the drafter would be ignored"):
        runs.drafted(target, RandomDrafter(), custom_generate=lambda *_, **__: None)

    assert runs.plain(target, custom_generate=lambda *_, **__: "its own") == "its own"


@pytest.mark.parametrize(
    "options", [{"verifier": "gumbel"}, {"generation_config": SpeculationConfig(verifier="gumbel")}]
)
def test_options_of_the_drafter_are_refused_where_the_call_has_them(options: dict[str, Any]) -> None:
    with pytest.raises(
        OptionError, match=r"`verifier` came with the call\. Set `drafter\.generation_config\.verifier`"
    ):
        runs.drafted(make_target(), RandomDrafter(), **options)


def test_a_drafter_on_another_device_is_refused() -> None:
    target, drafter = make_target(), make_drafter(make_target())
    elsewhere = make_drafter(make_target()).to("meta")

    with pytest.raises(
        GenerationError, match=r"on the target's device, `cpu`, but it is on `meta`\. Load its weights\."
    ):
        elsewhere.check_target(target)
    with pytest.raises(GenerationError, match="`LlamaForCausalLM` must have its weights to write text"):
        drafter.check_target(make_target().to("meta"))  # nobody is told to move the drafter there

    drafter.check_target(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drafter_dtype", [torch.float64, torch.bfloat16])
def test_a_drafter_computes_in_its_own_type(dtype: torch.dtype, drafter_dtype: torch.dtype) -> None:
    target = make_target().to(dtype)
    gold, drafter = runs.plain(target).sequences, make_drafter(target, block_size=2).to(drafter_dtype)

    out = runs.drafted(target, InformedDrafter(drafter, gold))

    assert out.speculation.num_accepted > 0
    assert (target.dtype, drafter.dtype) == (dtype, drafter_dtype)


def causal_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """Attention that reads no mask: every token sees all before it."""
    keys, values = (states.repeat_interleave(module.num_key_value_groups, dim=1) for states in (key, value))
    sees = torch.ones(query.shape[-2], keys.shape[-2], dtype=torch.bool).tril(keys.shape[-2] - query.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, sees).transpose(1, 2), None


def backward_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """Attention that also sees what comes later, so that not even a chain reads right."""
    keys, values = (states.repeat_interleave(module.num_key_value_groups, dim=1) for states in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values).transpose(1, 2), None


@pytest.fixture
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which Transformers knows a function."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "of_the_test", request.param)
    return "of_the_test"


@pytest.mark.parametrize("attention", [causal_attention], indirect=True)
def test_attention_that_reads_no_masks_gets_a_row_for_each_path_and_says_so(attention: str) -> None:
    target = make_target(attn_implementation=attention).double()
    gold, before = runs.plain(target).sequences, runs.traces(target)

    pair = runs.both(target, InformedDrafter(RandomDrafter(feature_layers=(1, -1)), gold))

    pair.assert_equal()
    assert pair.stats.num_accepted > 0
    assert [note.split(":")[0] for note in pair.stats.notes] == [
        "The target verifies one row for each path of a draft"
    ]
    assert runs.traces(target) == before


@pytest.mark.parametrize("attention", [backward_attention], indirect=True)
def test_attention_that_reads_no_chains_is_given_no_drafts_and_says_so(attention: str) -> None:
    target = make_target(attn_implementation=attention).double()
    gold, before = runs.plain(target).sequences, runs.traces(target)

    pair = runs.both(target, InformedDrafter(RandomDrafter(feature_layers=(1, -1)), gold))

    pair.assert_equal(is_kept=False)
    (note,) = pair.stats.notes
    assert note.startswith(
        "The target reads one token at a time, and nothing is drafted: even a chain's logits are off"
    )
    assert runs.traces(target) == before


def test_a_target_whose_state_cannot_be_put_aside_is_refused_and_left_as_it_was() -> None:
    target = make_target("rwkv")
    before, text = runs.traces(target), runs.plain(target).sequences

    with pytest.raises(
        GenerationError, match="keeps a state outside of the recurrent layers of Transformers' `DynamicCache`, so that"
    ):
        runs.drafted(target, RandomDrafter())

    assert runs.traces(target) == before
    assert runs.plain(target).sequences.equal(text)


PROMPT_LEARNING = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "P_TUNING": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
}


@pytest.mark.parametrize("name", PROMPT_LEARNING)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_adapters_that_learn_a_prompt_are_refused(family: str, name: str) -> None:
    bare = make_target(family).double()
    without = runs.plain(bare).sequences
    target = peft.get_peft_model(bare, PROMPT_LEARNING[name]()).double().eval()
    text, before = runs.plain(target).sequences, runs.traces(bare)
    drafter = InformedDrafter(RandomDrafter(feature_layers=(1, -1)), without)

    message = rf"but this adapter \({name}\) puts 5 virtual tokens before it\. Generate without `assistant_model`, or"
    with pytest.raises(GenerationError, match=message):
        runs.drafted(target, drafter)

    assert runs.traces(bare) == before
    assert runs.plain(target).sequences.equal(text)
    with target.disable_adapter():
        pair = runs.both(target, drafter)
    pair.assert_equal()
    assert pair.plain.sequences.equal(without)
    assert pair.stats.num_accepted > 0


@pytest.mark.parametrize("name", ["num_assistant_tokens", "assistant_confidence_threshold"])
@pytest.mark.parametrize("is_of_the_call", [True, False])
def test_options_of_stock_assistants_are_refused(name: str, is_of_the_call: bool) -> None:
    target = make_target()
    drafter = make_drafter(target)
    options = {name: 3} if is_of_the_call else {}
    if not is_of_the_call:
        setattr(drafter.generation_config, name, 3)

    with pytest.raises(
        OptionError, match=f"`{name}` is 3, but only Transformers' own assistants read it.*num_tree_nodes"
    ):
        runs.drafted(target, drafter, **options)
