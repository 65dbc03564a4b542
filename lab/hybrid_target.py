"""Makes a tiny target of Qwen3.5's shape: three layers of gated delta net, one of attention, 1.9 million parameters.

It reads with the tokenizer of `models/reference-target`, and learns from the mix of `lab/training_mix.py`. An interrupted run goes on from
its last checkpoint. One CPU core takes about 1.5 seconds a step.

Command: python -m lab.hybrid_target --data runs/data/train.jsonl --output runs/hybrid-target
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from .options import parsed

TOKENIZER = "models/reference-target"
LENGTH = 256  # tokens of a training row
SAVE_STEPS = 100


@dataclass
class TargetOptions:
    """What to learn from, and for how long."""

    data: str = field(metadata={"help": "Conversations, JSON lines."})
    output: str = field(metadata={"help": "Folder to write to."})
    steps: int = field(default=1000, metadata={"help": "Steps of 16 rows of 256 tokens."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and order."})


class Rows(Dataset[dict[str, torch.Tensor]]):
    """All conversations one after another, cut into rows of equal length."""

    def __init__(self, path: str, tokenizer: AutoTokenizer) -> None:
        token_ids: list[int] = []
        with Path(path).open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                messages = json.loads(line)["messages"]
                token_ids += tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]

        self.rows = torch.tensor(token_ids).unfold(0, LENGTH, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def target_config(tokenizer: AutoTokenizer) -> Qwen3_5TextConfig:
    """One period of Qwen3.5's layers, narrow."""
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save: tensors in bfloat16 that are loaded as float32, so that answers fit what is stored."""
    options = parsed(TargetOptions, __doc__, argv)
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = Rows(options.data, tokenizer)
    model = Qwen3_5ForCausalLM(target_config(tokenizer))
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M parameters, {len(rows)} rows")

    arguments = TrainingArguments(
        output_dir=f"{options.output}/checkpoints",
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=40,
        adam_beta2=0.95,
        weight_decay=0.05,
        use_cpu=True,
        bf16=True,
        logging_steps=20,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))

    output = Path(options.output)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    config = json.loads((output / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32"}
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
