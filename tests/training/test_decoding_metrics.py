"""The decoding metrics of an evaluation are what users get: the same prompts, the same tree, the saved drafter."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_rows, make_tokenizer
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_eagle, make_target
from tests.training.runs import SMALL, make_dataset, make_trainer, same, weights
from transformers_falcon_spec import DraftTree, EagleDrafter, FalconSpecDrafter, MedusaDrafter, SpeculationConfig
from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.training import trainer as trainer_file
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.features import FeatureCache, TargetFeatures
from transformers_falcon_spec.training.metrics import (
    GREEDY,
    decoding_copy,
    decoding_metrics,
    decoding_stats,
    held_out_prompts,
)

pytestmark = pytest.mark.training

DECODING = {"eval_decode_prompts": 3, "eval_decode_tokens": 12, "draft_tree_nodes": 6}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "falcon": (make_drafter, {"block_size": 2}),
    "eagle": (make_eagle, {}),
    "medusa": (MedusaDrafter.from_target, {"num_heads": 2}),
    "ar": (make_draft_model, {"num_hidden_layers": 1}),
    "dflash": (peaked_dflash, {"num_hidden_layers": 1, "block_size": 3, "target_layer_ids": [0]}),
}
LOADED: dict[str, Any] = {"falcon": FalconSpecDrafter, "eagle": EagleDrafter, "medusa": MedusaDrafter}


def first_questions(num_rows: int, seed: int) -> list[torch.Tensor]:
    """What a user would give to `generate` to have the first answer of each row written."""
    tokenizer = make_tokenizer()
    return [
        tokenizer.apply_chat_template(row[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")[
            "input_ids"
        ]
        for row in make_rows(num_rows, seed=seed)
    ]


def decoded(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of decoding that do not go by the clock."""
    return {name: value for name, value in metrics.items() if "acceptance" in name}


@pytest.mark.parametrize("kind", LOADED)
def test_an_evaluation_measures_the_acceptance_of_the_saved_drafter(tmp_path: Path, kind: str) -> None:
    make, options = KINDS[kind]
    trainer = make_trainer(tmp_path, options, make=make, max_steps=24, **DECODING)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.fit_draft_tree()
    trainer.save_model(str(tmp_path / "drafter"))

    drafter = LOADED[kind].from_pretrained(tmp_path / "drafter").eval()
    drafter.generation_config.tune = False
    total = GenerationStats()
    for prompt in first_questions(6, seed=1)[::2]:
        target = trainer.features.target
        target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        out = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
        )
        total += out.speculation
    assert metrics["eval_acceptance_length"] == total.acceptance_length > 1
    for depth, share in enumerate(total.acceptance_by_depth, start=1):
        assert metrics[f"eval_acceptance_at_depth_{depth}"] == share


@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_leaves_drafter_options_and_random_state_as_they_were(tmp_path: Path, kind: str) -> None:
    make, options = KINDS[kind]
    trainer = make_trainer(tmp_path, options, make=make, **DECODING)
    given = getattr(trainer.model, "generation_config", SimpleNamespace(to_dict=dict))
    before, options_before, state = weights(trainer), given.to_dict(), torch.get_rng_state()

    first, second = trainer.evaluate(), trainer.evaluate()

    assert decoded(first) == decoded(second)
    assert first["eval_acceptance_length"] >= 1
    assert torch.get_rng_state().equal(state)
    assert same(before, weights(trainer))
    assert given.to_dict() == options_before
    assert all(weight.requires_grad for weight in trainer.model.parameters())


@pytest.mark.parametrize("kind", ["falcon", "ar", "dflash"])
def test_a_drafter_of_full_precision_decodes_for_a_target_of_half(tmp_path: Path, kind: str) -> None:
    make, options = KINDS[kind]
    trainer = make_trainer(tmp_path, options, make=make, bf16=True, max_steps=1, **DECODING)
    trainer.features.target.to(torch.bfloat16)

    trainer.train()  # autocast is laid around the drafter here
    metrics = trainer.evaluate()

    assert metrics["eval_acceptance_length"] >= 1
    assert next(trainer.model.parameters()).dtype == torch.float32


@pytest.mark.usefixtures("machine_clock")
def test_nothing_is_tuned_so_that_no_number_depends_on_those_before(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **DECODING)
    target, prompts = trainer.features.target, first_questions(1, seed=1)

    drafter = decoding_copy(trainer.model, target, DraftTree.chain(2))

    tuning = [
        timed_generate(target, prompts[0], 8, GREEDY, 0, each).output.speculation.tuning
        for each in (drafter, trainer.model.eval())
    ]
    assert tuning[0] == {} != tuning[1]


def test_the_copy_drafts_the_tree_that_its_options_or_its_kind_ask_for_first() -> None:
    target, fitted, own = make_target(**SMALL), DraftTree.chain(2), DraftTree.chain(1)
    falcon, eagle = make_drafter(target), make_eagle(target)
    asked = make_drafter(target)
    asked.generation_config = SpeculationConfig(draft_tree=own.to_json())

    copies = [decoding_copy(drafter, target, fitted) for drafter in (falcon, eagle, asked)]

    assert [copied.generation_config.draft_tree for copied in copies] == [fitted.to_json(), None, own.to_json()]
    assert [copied.is_tree_dynamic for copied in copies] == [False, True, False]


def informed(target: PreTrainedModel) -> PreTrainedModel:
    """A draft model that is always right: the target itself."""
    return decoding_copy(make_target(**SMALL), target, None)


def test_a_draft_model_that_is_always_right_has_every_candidate_kept() -> None:
    target, prompts = make_target(**SMALL), [prompt[0].tolist() for prompt in first_questions(3, seed=1)]
    drafter = informed(target)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0

    found = decoding_stats(target, drafter, prompts, 16)  # four of them before the first step

    assert decoding_metrics(found)["acceptance_length"] == 4.0
    assert [decoding_metrics(found)[f"acceptance_at_depth_{depth}"] for depth in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert found.num_tokens == 3 * 16


def test_stock_drafting_is_counted_alike_in_any_company() -> None:
    target, prompts = make_target(**SMALL), [prompt[0].tolist() for prompt in first_questions(3, seed=1)]
    drafter = informed(target)
    options = (
        drafter.generation_config
    )  # with this schedule chains grow while all goes well, and their length is written back
    options.num_assistant_tokens_schedule = "heuristic"
    options.num_assistant_tokens, options.assistant_confidence_threshold = 1, 0.0

    together = decoding_stats(target, drafter, prompts, 12)
    separately = sum((decoding_stats(target, drafter, [prompt], 12) for prompt in prompts), GenerationStats())

    assert together.acceptance_histogram == separately.acceptance_histogram
    assert set(together.acceptance_histogram) == {3, 5}  # 1 before the first step, then 3, then what is left of 5
    assert drafter.generation_config.num_assistant_tokens == 1


def test_the_metrics_are_those_of_the_counts() -> None:
    stats = GenerationStats()
    stats.record(num_nodes=3, max_depth=2, num_accepted=1)

    metrics = decoding_metrics(stats + GenerationStats())

    assert metrics == {"acceptance_length": 2.0, "acceptance_at_depth_1": 1.0, "acceptance_at_depth_2": 0.0}
    assert decoding_metrics(GenerationStats()) == {}


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_prompts_end_where_the_first_answer_begins(template: str) -> None:
    turns = [*make_rows(1)[0], *make_rows(1, seed=5)[0]]
    data = ConversationDataset([turns], make_tokenizer(template), 64)

    (prompt,) = held_out_prompts(data, 4, math.inf)

    expected = make_tokenizer(template).apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=True)
    assert prompt == list(expected["input_ids"])


def test_prompts_are_chosen_evenly_from_those_that_fit() -> None:
    lengths = [3, 9, 4, 5, 0, 6, 7]
    data = [{"input_ids": list(range(10)), "assistant_mask": [0] * n + [1] * (10 - n)} for n in lengths]
    data.append({"input_ids": [1, 2], "assistant_mask": [0, 0]})

    assert [len(prompt) for prompt in held_out_prompts(data, 2, 8)] == [3, 5]
    assert [len(prompt) for prompt in held_out_prompts(data, 9, 8)] == [3, 4, 5, 6, 7]
    assert [len(prompt) for prompt in held_out_prompts(data, 9, math.inf)] == [3, 9, 4, 5, 6, 7]
    assert held_out_prompts(data, 3, 2) == []


def test_prompts_of_cached_features_are_those_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_dataset(5)
    cache = FeatureCache(data, TargetFeatures(make_target(**SMALL), (-1,), 2), tmp_path)
    monkeypatch.setattr(cache, "_shards", None)  # must not be read

    assert held_out_prompts(cache, 5, math.inf) == held_out_prompts(data, 5, math.inf)


def test_without_a_prompt_that_fits_the_context_nothing_is_decoded_and_a_warning_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make_trainer(tmp_path, **{**DECODING, "eval_decode_tokens": 255}).evaluate()

    assert decoded(metrics) == {}
    assert "No prompt of the evaluation data has at most 1 tokens: none is decoded" in caplog.text


@pytest.mark.parametrize("options", [{"eval_decode_prompts": 0}, {"prediction_loss_only": True}])
def test_evaluation_does_not_decode_unless_asked(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_file, "decoding_stats", None)  # must not be called

    assert decoded(make_trainer(tmp_path, **{**DECODING, **options}).evaluate()) == {}


def test_each_of_several_evaluation_sets_has_its_own_numbers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **DECODING)
    alone = trainer.evaluate()
    sets = {"one": trainer.eval_dataset, "other": make_dataset(4, seed=2)}

    metrics = trainer.evaluate(sets)

    assert metrics["eval_one_acceptance_length"] == alone["eval_acceptance_length"]
    assert "eval_other_acceptance_length" in metrics


def test_a_sharded_drafter_is_not_decoded_with_and_a_warning_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, **DECODING)

    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)

    assert not trainer._can_decode()
    assert "no process holds the whole drafter" in caplog.text


def test_a_target_that_cannot_verify_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, **DECODING)
    monkeypatch.setattr(type(trainer.features.target), "_is_stateful", True)
    monkeypatch.setattr(trainer, "training_step", None)  # must not be called

    with pytest.raises(TrainingError, match=r"rejected drafts cannot be taken back.*set `eval_decode_prompts` to 0"):
        trainer.train()
