"""A tiny tokenizer with a chat template, conversations, and files of them: what tests of training and of commands read.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB_SIZE, make_target

PLAIN_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant>"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<system>", "<user>", "<assistant>"]
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "plus",
    "minus",
    "times",
    "is",
    "equal",
    "to",
    "what",
]


def make_tokenizer(template: str | None = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer over letters and spaces, of the tiny targets' vocabulary size at most."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3 + ["abcdefghijklmnopqrstuvwxyz ?.!0123456789"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    fast.chat_template = template
    return fast


def make_rows(num_rows: int, num_words: int = 12, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one question and an answer of up to `num_words` words."""
    generator = torch.Generator().manual_seed(seed)

    def words(least: int, most: int) -> str:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))

    return [
        [
            {"role": "user", "content": words(2, 5)},
            {"role": "assistant", "content": words(max(num_words // 2, 1), num_words)},
        ]
        for _ in range(num_rows)
    ]


def write_rows(path: Path, rows: list[list[dict[str, str]]]) -> Path:
    """A JSON lines file of conversations."""
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


def save_target(folder: Path, **changes: Any) -> Path:
    """A tiny target and its tokenizer in one folder, as `from_pretrained` reads it."""
    target = make_target(**changes)
    target.generation_config.eos_token_id = 2
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
