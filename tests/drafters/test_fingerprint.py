"""The target fingerprint: what a drafter's config keeps of its target, and what is logged when another one is at hand."""

import copy
import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.inflation import Shape, inflate, inflate_drafter
from tests.adapters import adapted
from tests.chat import MARKED_TEMPLATE, make_tokenizer
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import FalconSpecDrafter, LookaheadDrafter
from transformers_falcon_spec.drafters.fingerprint import (
    LAYER_ROWS,
    TABLE_ROWS,
    TargetFingerprint,
    check_fingerprint,
    mismatches_of,
    record_target,
)
from transformers_falcon_spec.errors import CheckpointError

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers_falcon_spec.drafters.fingerprint._LOGGED", set())


def names(drafter: Any, target: Any, tokenizer: Any = None) -> list[str]:
    return [mismatch.name for mismatch in mismatches_of(drafter, target, tokenizer)]


def fine_tuned(target: Any, part: str = "layers.0", by: float = 1e-3) -> Any:
    """A copy whose weights of one part are a little different."""
    changed = copy.deepcopy(target)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if part in name and weight.dim() > 1:
                weight.mul_(1 + by)
    return changed


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_target_itself_is_met_in_silence_wherever_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target()
    target.save_pretrained(tmp_path / "moved")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "moved").eval()
    drafter = FalconSpecDrafter.from_pretrained(tmp_path / "drafter")

    moved.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4, do_sample=False)

    assert drafter.config.target_fingerprint["weights"].keys() == {"embeddings", "head", "layers"}
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("part", "differing"),
    [
        ("layers.0", "its layers differ, as after"),
        ("layers.1", "its layers differ, as after"),
        ("embed_tokens", "its embeddings differ, as after"),
        ("lm_head", "its head differ, as after"),
        ("weight", "its embeddings and head and layers differ, as after"),
    ],
)
def test_a_fine_tuned_target_is_named_with_the_parts_that_differ(part: str, differing: str) -> None:
    target = make_target()
    drafter = make_drafter(target)

    (found,) = mismatches_of(drafter, fine_tuned(target, part, by=0.05))

    assert found.name == "other target"
    assert differing in found.text
    assert "The text stays the target's own, but expect fewer drafts" in found.text


def test_what_differs_is_logged_once_for_a_pair_and_the_text_is_the_targets(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target()
    drafter, other = make_drafter(target), fine_tuned(target)

    for _ in range(3):
        text = other.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    logged = warnings_of(caplog)
    check_fingerprint(copy.copy(drafter), fine_tuned(target, "layers.1"))
    drafter.config._name_or_path = "people/drafter"
    check_fingerprint(copy.copy(drafter), other)

    assert text.equal(other.generate(make_prompt(), max_new_tokens=4, do_sample=False))
    assert len(logged) == 1
    assert "layers differ" in logged[0]
    assert len(warnings_of(caplog)) == 2  # a copy does not repeat its words, another drafter does


@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used_in", [torch.float32, torch.bfloat16, torch.float16])
def test_another_dtype_is_not_taken_for_other_weights(made_in: Any, used_in: Any) -> None:
    target = make_target()
    drafter = make_drafter(copy.deepcopy(target).to(made_in))

    found = mismatches_of(drafter, copy.deepcopy(target).to(used_in))

    assert found == []


def test_another_model_of_the_same_widths_is_named_with_what_differs() -> None:
    drafter = make_drafter(make_target(num_hidden_layers=2))

    (found,) = mismatches_of(drafter, make_target(num_hidden_layers=3))

    assert found.name == "other target"
    assert "num_hidden_layers 3 instead of 2" in found.text
    assert "hardly any draft is kept" in found.text


@pytest.mark.parametrize(
    ("field", "cost"),
    [
        ("bos_token_id", "expect slightly fewer drafts to be kept where texts begin"),
        ("eos_token_id", "expect what ends a text or a turn hardly ever to be drafted"),
    ],
)
def test_other_special_ids_of_the_same_tokens_are_logged_with_their_cost_and_drafts_are_kept(
    field: str, cost: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference").eval()
    chat = fine_tuned(target)  # as a chat model is of its base model
    setattr(chat.config, field, 7)
    options = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}

    out = chat.generate(make_prompt(), assistant_model=drafter, **options)

    (ids, weights) = warnings_of(caplog)
    assert f"`{field}` to be " in ids
    assert cost in ids
    assert "layers differ" in weights
    assert out.sequences.equal(chat.generate(make_prompt(), **options).sequences)
    assert out.speculation.num_accepted > 0


def test_one_end_token_in_common_is_enough_and_padding_does_not_matter() -> None:
    drafter = make_drafter(make_target(eos_token_id=[2, 5], pad_token_id=0))

    assert names(drafter, make_target(eos_token_id=[5, 7], pad_token_id=3)) == []


def test_the_chat_template_is_compared_where_both_are_known() -> None:
    target, tokenizer = make_target(), make_tokenizer()
    drafter = make_drafter(target)
    assert names(drafter, target, make_tokenizer(MARKED_TEMPLATE)) == []  # none was at hand when it was made

    record_target(drafter.config, target, tokenizer)

    assert names(drafter, target) == names(drafter, target, tokenizer) == []
    assert names(drafter, target, make_tokenizer(MARKED_TEMPLATE)) == ["wrong template"]
    assert names(drafter, target, make_tokenizer(None)) == ["wrong template"]


def test_arguments_for_the_chat_template_are_compared_where_they_are_known() -> None:
    target, tokenizer = make_target(), make_tokenizer()
    drafter = make_drafter(target)

    record_target(drafter.config, target, tokenizer, {"enable_thinking": False})

    assert drafter.config.target_fingerprint["template_kwargs"] == {"enable_thinking": False}
    assert mismatches_of(drafter, target, tokenizer) == []
    assert mismatches_of(drafter, target, tokenizer, {"enable_thinking": False}) == []
    (other,) = mismatches_of(drafter, target, tokenizer, {})
    assert other.name == "wrong template"
    assert 'gets {}, and this drafter was trained with {"enable_thinking": false}' in other.text
    assert "Give `--chat_template_kwargs '{\"enable_thinking\": false}'`" in other.remedy


def test_the_weights_of_a_quantised_target_are_left_alone() -> None:
    target = make_target()
    drafter = make_drafter(target)
    for module in target.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.to(torch.int8), requires_grad=False)
    assert names(drafter, target) == []
    assert TargetFingerprint.of_target(target).weights.keys() == {"embeddings", "head"}


def offloaded(weight: torch.Tensor) -> torch.Tensor:
    return weight.to("meta")


def gathered_elsewhere(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(0, weight.shape[1])


@pytest.mark.parametrize("hide", [offloaded, gathered_elsewhere])
def test_weights_that_are_not_here_are_not_fetched_to_be_looked_at(hide: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    for module in target.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(hide(module.weight.detach()))

    fingerprint = TargetFingerprint.of_target(target)

    assert fingerprint.weights.keys() == {"embeddings", "head"}
    assert names(drafter, target) == []  # what can be seen is the same


def test_an_adapter_is_noticed_and_belongs_to_the_layers() -> None:
    target = make_target()
    drafter = make_drafter(target)
    get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert names(drafter, target) == ["other target"]

    record_target(drafter.config, target)

    assert names(drafter, target) == []


def test_an_adapter_of_the_drafter_fits_it_to_another_target(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target()
    adapted_drafter = adapted(make_drafter(target)).get_base_model()

    check_fingerprint(adapted_drafter, fine_tuned(target))
    logged = warnings_of(caplog)
    check_fingerprint(make_drafter(target), fine_tuned(target))

    assert logged == []
    assert len(warnings_of(caplog)) == 1


def test_drafters_without_a_fingerprint_and_those_for_any_target_say_nothing() -> None:
    target = make_target()
    drafter = make_drafter(target, target_fingerprint=None)
    other = fine_tuned(target)

    assert names(drafter, other) == names(LookaheadDrafter.from_target(target), other) == []


def test_an_inflated_pair_is_met_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target()
    drafter = make_drafter(target)
    shape = Shape(256, 384, 4, 4, 2, 64, target.config.vocab_size)
    large_target, large = inflate(target, shape), inflate_drafter(drafter, target, shape)

    large_target.generate(make_prompt(), assistant_model=large, max_new_tokens=4, do_sample=False)

    assert drafter.config.target_fingerprint is not None
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    "fingerprint",
    [
        {"dtype": "float32"},
        {"weights": {"head": 3}},
        {"weights": {"layers": {}}, "shape": {}, "dtype": "float32"},
    ],
)
def test_a_fingerprint_that_cannot_be_read_is_refused_in_words(fingerprint: Any) -> None:
    target = make_target()
    drafter = make_drafter(target, target_fingerprint=fingerprint)

    with pytest.raises(
        CheckpointError, match="`target_fingerprint` of a drafter's config must be as training writes it"
    ):
        drafter.check_target(target)


@pytest.mark.parametrize(("part", "rows"), [("embeddings", TABLE_ROWS), ("layers", LAYER_ROWS)])
def test_fingerprints_are_those_of_rows_cut_out_of_the_whole_weights(part: str, rows: tuple[float, ...]) -> None:
    target = make_target(num_hidden_layers=1)
    layers = [weight for name, weight in target.model.named_parameters() if "layers" in name and weight.dim() > 1]
    whole = {"embeddings": [target.get_input_embeddings().weight], "layers": layers}[part]

    values = [
        value
        for weight in whole
        for fraction in rows
        for value in weight.float()[int(fraction * len(weight))].tolist()[:256]
    ]

    digest = hashlib.blake2b(torch.tensor(values).numpy().tobytes(), digest_size=8).hexdigest()
    assert TargetFingerprint.of_target(target).weights[part] == {"digest": digest}


def test_the_embedded_pair_fits(caplog: pytest.LogCaptureFixture) -> None:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target").eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "reference-target")
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference").eval()

    stored = TargetFingerprint.from_json(drafter.config.target_fingerprint)
    given = TargetFingerprint.of_target(target, tokenizer)
    for part in ("embeddings", "head", "layers"):
        assert stored.weights[part]["digest"] == given.weights[part]["digest"]
    assert replace(stored, weights={}) == replace(given, weights={})
    assert names(drafter, target, tokenizer) == []


@pytest.mark.filterwarnings("ignore")  # torch says that this way of quantising grows old
def test_layers_whose_weight_is_a_function_are_not_looked_at() -> None:
    target = make_target("llama")
    kinds = {torch.nn.Linear, torch.nn.Embedding}
    mapping = {
        torch.nn.Linear: torch.ao.quantization.default_dynamic_qconfig,
        torch.nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig,
    }
    packed = torch.ao.quantization.quantize_dynamic(target, mapping)
    assert not any(type(part) in kinds for part in packed.modules())

    found = TargetFingerprint.of_target(packed)

    assert found.weights == {}
