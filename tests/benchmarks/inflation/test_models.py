"""Inflated models compute what the small ones do, at the sizes asked for."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.inflation import SHAPES, Layout, Shape, inflate, inflate_drafter
from tests import runs
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree, FalconSpecDrafter, LookaheadDrafter
from transformers_falcon_spec.drafters.falcon import FalconCandidateGenerator
from transformers_falcon_spec.errors import OptionError

# The tiny Llama: hidden 64, inner 96, 3 layers, 4 heads of 16 over 2 key heads, 97 ids.
WIDER = Shape(256, 160, 5, 4, 2, 64, VOCAB_SIZE)
NEW_IDS = Shape(256, 160, 5, 4, 2, 64, 400)
SHAPES_TRIED = {
    "wider": WIDER,
    "new ids": NEW_IDS,
    "deeper": Shape(64, 96, 7, 4, 2, 16, VOCAB_SIZE),
    "one key head for each": Shape(256, 96, 3, 8, 8, 16, 400),
    "sixteen times": Shape(1024, 100, 3, 16, 4, 256, 128),
    "more key heads": Shape(256, 96, 4, 8, 4, 64, VOCAB_SIZE),
}
TREE = DraftTree.from_lists(runs.BUSHY).to_json()


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def _norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock RMSNorm computes in float32, whatever it is given."""

    def forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
        return norm.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", SHAPES_TRIED)
def test_an_inflated_target_has_the_logits_of_the_small_one(
    name: str, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_target(tie_word_embeddings=is_tied, attention_bias=is_tied, mlp_bias=is_tied)
    with torch.no_grad():
        for part in small.modules():
            if isinstance(part, LlamaRMSNorm):
                part.weight.uniform_(0.5, 1.5)
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.uniform_(-0.5, 0.5)

    large = inflate(small, SHAPES_TRIED[name])

    ids = make_prompt(40)
    expected, found = _logits(small, ids), _logits(large, ids)
    torch.testing.assert_close(found[..., :VOCAB_SIZE], expected, rtol=1e-4, atol=1e-4)
    _norms_in_double(monkeypatch)
    expected, found = _logits(small.double(), ids), _logits(large.double(), ids)
    torch.testing.assert_close(found[..., :VOCAB_SIZE], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SHAPES_TRIED)
def test_an_inflated_target_writes_the_text_of_the_small_one(name: str) -> None:
    small = make_target(seed=3)

    large = inflate(small, SHAPES_TRIED[name])

    text = runs.plain(small, max_new_tokens=64).sequences
    assert runs.plain(large, max_new_tokens=64).sequences.equal(text)


def test_low_precision_and_scaled_rotary_positions_keep_the_function() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    small = make_target(rope_parameters={**rope, "original_max_position_embeddings": 64})
    expected = _logits(small, make_prompt(100))

    large = inflate(small, NEW_IDS, dtype=torch.bfloat16)

    assert large.dtype == torch.bfloat16
    torch.testing.assert_close(
        _logits(inflate(small, NEW_IDS), make_prompt(100))[..., :VOCAB_SIZE], expected, rtol=1e-4, atol=1e-4
    )
    small_error = (_logits(small.bfloat16(), make_prompt(100)).float() - expected).abs().mean()
    large_error = (_logits(large, make_prompt(100)).float()[..., :VOCAB_SIZE] - expected).abs().mean()
    assert large_error < 1.5 * small_error


@pytest.mark.parametrize("is_tied", [False, True])
def test_new_ids_are_never_chosen_even_where_padding_is_the_best_token(is_tied: bool) -> None:
    small, prompt = make_target(tie_word_embeddings=is_tied), make_prompt()
    best = int(_logits(small, prompt)[0, -1].argmax())
    assert not {0, best} & set(prompt.flatten().tolist())
    with torch.no_grad():  # the padding token replaces the best one
        head = small.get_output_embeddings().weight
        head[torch.tensor([0, best])] = head[torch.tensor([best, 0])]
    expected = _logits(small, prompt)[0, -1]

    found = _logits(inflate(small, NEW_IDS), prompt)[0, -1]

    assert expected.argmax() == found.argmax() == 0
    assert found[VOCAB_SIZE:].max() < -1e4
    probs = found.softmax(-1)
    assert probs[VOCAB_SIZE:].count_nonzero() == 0
    torch.testing.assert_close(probs[:VOCAB_SIZE], expected.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [WIDER, NEW_IDS])
def test_an_inflated_target_is_a_stock_model_of_the_shape_asked_for(shape: Shape, tmp_path: Any) -> None:
    small = make_target(tie_word_embeddings=True)

    large = inflate(small, shape)
    large.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert Shape.of(loaded.config) == shape
    fresh = LlamaForCausalLM(LlamaConfig(**vars_of(shape), tie_word_embeddings=shape is WIDER))
    assert large.num_parameters() == fresh.num_parameters()
    assert _logits(loaded, make_prompt()).equal(_logits(large, make_prompt()))


def vars_of(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in Shape.__dataclass_fields__}


def test_layers_that_add_nothing_run_in_full() -> None:
    large = inflate(make_target(), WIDER)
    extra = large.model.layers[3:]
    added: list[float] = []
    for layer in extra:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(lambda _part, _inputs, out: added.append(_first(out).abs().max().item()))

    cache = large(make_prompt(), use_cache=True).past_key_values

    assert added == [0.0] * 4
    for index, layer in enumerate(extra, start=3):
        assert cache.layers[index].keys.abs().max() > 0
        assert all(w.abs().max() > 0 for w in (layer.mlp.gate_proj.weight, layer.self_attn.v_proj.weight))


def _first(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize("shape", [WIDER, NEW_IDS])
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 2},
        {"block_size": 3, "recurrence": "token", "attention_bias": True, "num_hidden_layers": 2},
        {"block_size": 2, "feature_layers": [1, -2, 3], "block_position_embedding": False, "num_recurrent_layers": 1},
    ],
)
def test_an_inflated_drafter_has_the_outputs_of_the_small_one(
    options: dict[str, Any], shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    _norms_in_double(monkeypatch)
    target = make_target().double()
    drafter = make_drafter(target, **options)
    large_target = inflate(target, shape)

    large = inflate_drafter(drafter, target, shape)

    large.check_target(large_target)
    ids = make_prompt(20)
    phases = torch.tensor([1])
    outputs = []
    for model, its_drafter in ((target, drafter), (large_target, large)):
        states = model(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in its_drafter.feature_layers], dim=-1)
        outputs.append(model.lm_head(its_drafter(model.get_input_embeddings()(ids), features, phases=phases)))
    torch.testing.assert_close(outputs[1][..., :VOCAB_SIZE], outputs[0], rtol=0, atol=1e-10)
    assert shape is WIDER or outputs[1][..., VOCAB_SIZE:].max() < -1e4


@pytest.mark.parametrize("recurrence", ["token", "sequence"])
def test_an_inflated_drafter_proposes_the_tokens_of_the_small_one(
    recurrence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(seed=2).double()
    drafter = make_drafter(target, block_size=2, recurrence=recurrence, draft_tree=TREE)
    large_target, large = inflate(target, NEW_IDS), inflate_drafter(drafter, target, NEW_IDS)
    proposals: list[list[int]] = []
    propose = FalconCandidateGenerator.propose

    def recorded(generator: Any, budget: Any) -> Any:
        draft = propose(generator, budget)
        proposals.append([] if draft is None else draft.token_ids.flatten().tolist())
        return draft

    monkeypatch.setattr(FalconCandidateGenerator, "propose", recorded)

    small_run = runs.drafted(target, drafter, max_new_tokens=32)
    expected, proposals[:] = list(proposals), []
    large_run = runs.drafted(large_target, large, max_new_tokens=32)

    assert proposals == expected
    assert sum(map(len, proposals)) > 200
    assert large_run.sequences.equal(small_run.sequences)
    assert large_run.speculation.acceptance_histogram == small_run.speculation.acceptance_histogram


def test_draft_models_and_drafters_without_weights_follow_their_target(tmp_path: Any) -> None:
    target = make_target(seed=2).double()
    draft_model = make_target(seed=5, num_hidden_layers=1, tie_word_embeddings=True).double()
    lookahead = LookaheadDrafter.from_target(target, window_size=3, ngram_len=3, num_guesses=2)
    large_target = inflate(target, NEW_IDS)

    large_model = inflate_drafter(draft_model, target, NEW_IDS)
    large_lookahead = inflate_drafter(lookahead, target, NEW_IDS)

    gold = runs.plain(target).sequences
    for drafter in (large_model, large_lookahead):
        assert runs.drafted(large_target, drafter).sequences.equal(gold)
    assert Shape.of(large_model.config) == Shape(256, 160, 1, 4, 2, 64, 400)
    small_run, large_run = runs.drafted(target, lookahead), runs.drafted(large_target, large_lookahead)
    assert small_run.speculation.acceptance_histogram == large_run.speculation.acceptance_histogram


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(128, 96, 3, 4, 2, 16, 97), r"`hidden_size` must be 64 times a power of 4, .* but it is 128"),
        (Shape(32, 96, 3, 4, 2, 16, 97), r"`hidden_size` must be 64 times a power of 4, .* but it is 32"),
        (Shape(256, 96, 3, 4, 2, 32, 97), r"`head_dim` must be 16 times a power of 4, .* but it is 32"),
        (Shape(64, 96, 3, 4, 2, 16, 98), r"larger `vocab_size` needs a larger `hidden_size`"),
    ],
)
def test_shapes_that_cannot_be_exact_are_refused(shape: Shape, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        inflate(make_target(), shape)


def _gated_init(layer: Any) -> Any:
    """The constructor of a layer that has one weight more."""
    init = layer.__init__

    def with_gate(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.gate = nn.Linear(64, 1)

    return with_gate


def test_models_without_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"must be one of \['dflash_spec', .*'llama', .*\], but this one is `qwen3`"):
        inflate(make_target("qwen3"), WIDER)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(OptionError, match=r"`rope_type` must be one of .* but it is `dynamic`"):
        inflate(make_target(rope_parameters=rope), WIDER)
    with pytest.raises(OptionError, match=r"needs an `rms_norm_eps` of at least 9.3e-10, .* but it is 0.0"):
        inflate(make_target(rms_norm_eps=0.0), NEW_IDS)
    with pytest.raises(OptionError, match="too large for float16"):
        inflate(make_target(), NEW_IDS, dtype=torch.float16)
    gated = make_target()
    gated.model.layers[0].gate = nn.Linear(64, 1)
    monkeypatch.setattr(type(gated.model.layers[0]), "__init__", _gated_init(type(gated.model.layers[0])))
    with pytest.raises(OptionError, match=r"`model\.layers\.0\.gate\.weight` must have a rule"):
        inflate(gated, WIDER)
    narrow = FalconSpecDrafter.from_target(make_target(), embedding_size=32)
    with pytest.raises(OptionError, match="`embedding_size` and the width of each feature must be `hidden_size`, 64"):
        inflate_drafter(narrow, make_target(), WIDER)


def test_shapes_under_a_name_fit_the_embedded_target_and_its_drafter() -> None:
    target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    small = Shape.of(target.config)
    millions = {}
    for name, shape in SHAPES.items():
        Layout(small, shape)
        with torch.device("meta"):
            config = LlamaConfig(**vars_of(shape), tie_word_embeddings=False)
            millions[name] = round(LlamaForCausalLM(config).num_parameters() / 1e6)
        own = Shape.of(FalconSpecDrafter.from_pretrained("models/falcon-reference").config)
        Layout(own, own.along(small, shape))
    assert millions == {"0.3b": 303, "1b": 1011, "7b": 7248}


@pytest.mark.slow
def test_the_embedded_pair_keeps_its_text_and_acceptance_at_four_times_the_width() -> None:
    target = AutoModelForCausalLM.from_pretrained("models/reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained("models/falcon-reference").eval()
    tokenizer = AutoTokenizer.from_pretrained("models/reference-target")
    shape = Shape(1024, 2816, 14, 8, 4, 128, 8192)
    large_target, large = inflate(target, shape), inflate_drafter(drafter, target, shape)
    messages = [{"role": "user", "content": "Tom has 3 boxes of 12 pencils. How many pencils does he have?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}

    small_run = target.generate(**ids, assistant_model=drafter, **options)
    large_run = large_target.generate(**ids, assistant_model=large, **options)

    assert large_target.generate(**ids, **options).sequences.equal(small_run.sequences)
    assert large_run.sequences.equal(small_run.sequences)
    assert small_run.speculation.acceptance_length > 2
    assert large_run.speculation.acceptance_histogram == small_run.speculation.acceptance_histogram
