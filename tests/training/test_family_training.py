"""A drafter is trained on conversations whose template takes thoughts out of earlier turns, and its texts are the target's own."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat_families import FAMILIES, family_rows, family_tokenizer
from tests.tiny import make_target
from tests.training.runs import QUIET, SHORT, SMALL, loss_curve, make_trainer
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.trainer import DrafterTrainer

SLOW = ["llama3", "gemma", "mistral", "phi", "deepseek-r1"]


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_drafter_learns_from_each_family_and_its_texts_are_the_targets_own(name: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(name)
    rows = family_rows(24 if name == "qwen3" else 500, FAMILIES[name])
    kwargs = {"enable_thinking": True} if name == "qwen3" else {}
    data = ConversationDataset(rows, tokenizer, 256, template_kwargs=kwargs)
    assert data.treatments[FAMILIES[name].thinking_treatment] > 8

    trainer = make_trainer(
        tmp_path,
        {"block_size": 2},
        data,
        make_target_of_run=lambda: make_target(vocab_size=len(tokenizer), **SMALL),
        eval_strategy="no",
        logging_steps=6,
    )
    trainer.train()
    trainer.model.save_pretrained(tmp_path)

    losses = loss_curve(trainer)
    assert losses[-1] < losses[0]
    drafter = FalconSpecDrafter.from_pretrained(tmp_path).eval()
    assert drafter.config.target_fingerprint.get("template_kwargs", {}) == kwargs
    question = [turn for turn in rows[0] if turn["role"] == "user"][:1]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    target, greedy = trainer.features.target, {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    assert torch.equal(
        target.generate(**prompt, **greedy, assistant_model=drafter), target.generate(**prompt, **greedy)
    )


def test_conversations_with_arguments_for_the_template_are_recorded_with_their_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, family = family_tokenizer("qwen3"), FAMILIES["qwen3"]
    rows = [{"messages": row} for row in family_rows(12, family, share_thinking=0)]
    rows += [{"messages": [{"role": "tool", "content": "a"}]}]

    def trainer(**options: Any) -> DrafterTrainer:
        return DrafterTrainer(
            target=make_target(vocab_size=len(tokenizer), **SMALL),
            args=DrafterTrainingArguments(str(tmp_path), **QUIET, **SHORT),
            train_dataset=rows,
            processing_class=tokenizer,
            **options,
        )

    with caplog.at_level(logging.INFO):
        trained = trainer(template_kwargs={"enable_thinking": False})
    told = caplog.text
    trainer()

    assert "13 rows: " in told
    assert "Left out: 1 rows: an unknown role" in told
    assert "a switch `enable_thinking`" not in told
    assert "a switch `enable_thinking`, which was not given" in caplog.text
    trained.start_seconds = 0.0  # it has not begun
    record = trained.record()
    assert (sum(record["rows"].values()), record["rows"]["an unknown role"]) == (13, 1)
    assert record["template_kwargs"] == {"enable_thinking": False}
