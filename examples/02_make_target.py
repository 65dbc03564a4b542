"""Make a small target from conversations: a tokenizer with a chat template, and a Llama trained on the Hugging Face Trainer.

Purpose: a real language model of a few million parameters on which acceptance and losslessness can be measured.
Data: conversations of yours or of a public set, as JSON lines of `{"messages": [...]}`; some ten thousand make a model worth measuring.
Commands, first short texts, then long ones:
    python examples/02_make_target.py --data conversations.jsonl --output runs/target-256 --steps 3000
    python examples/02_make_target.py --data conversations.jsonl --output runs/target --init runs/target-256 \
        --length 1024 --batch 4 --learning-rate 6e-4 --steps 1000
Hardware and time: two CPU cores train about 2,400 tokens a second; raise `--layers`, `--hidden` and `--batch` on a GPU.
`models/reference-target` was made by an earlier form of this recipe; see its README. `--tiny` takes seconds.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TINY_ROWS = [
    [{"role": "user", "content": f"{i} plus 1?"}, {"role": "assistant", "content": f"It is {i + 1}."}]
    for i in range(64)
]


class TokenStream(Dataset[dict[str, torch.Tensor]]):
    """All conversations in a row, cut into pieces of equal length."""

    def __init__(self, rows: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerFast, length: int) -> None:
        ids = [i for row in rows for i in tokenizer.apply_chat_template(row, return_dict=True)["input_ids"]]
        self.pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def make_tokenizer(rows: list[list[dict[str, str]]], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits apart, fitted to the conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((message["content"] for row in rows for message in row), trainer)
    special = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "mask_token": SPECIAL[6]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=context, **special)
    fast.chat_template = TEMPLATE
    return fast


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings, or the one to go on from."""
    if args.init:
        return LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(args.hidden // 64, 1),
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train and save: bf16 tensors, loaded as float32, so that answers generated for distillation fit what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("conversations.jsonl"), help="conversations, JSON lines")
    parser.add_argument("--output", type=Path, default=Path("runs/target"), help="folder to write to")
    parser.add_argument("--init", type=Path, help="folder of a target to go on from")
    parser.add_argument("--length", type=int, default=256, help="tokens of a training piece")
    parser.add_argument("--context", type=int, default=1024, help="longest text the target can read")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few rows and steps: a trial without files")
    args = parser.parse_args()
    if args.tiny:
        args.length, args.hidden, args.layers, args.steps, args.batch, args.vocab_size = 16, 64, 2, 3, 2, 300
    set_seed(args.seed)
    lines = [] if args.tiny else args.data.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line)["messages"] for line in lines if line] or TINY_ROWS
    if args.init:
        source = AutoTokenizer.from_pretrained(args.init)
    else:
        source = make_tokenizer(rows, args.vocab_size, args.context)
    model = make_model(args, source)
    arguments = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        adam_beta2=0.95,
        weight_decay=0.05,
        warmup_steps=min(40, args.steps // 2),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    Trainer(model=model, args=arguments, train_dataset=TokenStream(rows, source, args.length)).train()
    model.to(torch.bfloat16).save_pretrained(args.output)
    source.save_pretrained(args.output)
    config = args.output / "config.json"
    text = json.dumps({**json.loads(config.read_text(encoding="utf-8")), "dtype": "float32"}, indent=2)
    config.write_text(text + "\n", encoding="utf-8")
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters -> {args.output}")


if __name__ == "__main__":
    main()
