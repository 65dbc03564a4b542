"""A drafter for a base model in one go: its own stories, training, and what decoding with the drafter brings.

The target stands for any model without a chat template: it gets one that adds nothing but the start and the end of a text, and is
saved with it. Stories are drawn from the start token on by `regenerate`, so that no data is needed. The first sentence of each is the
prompt, the rest the answer. A tenth of them is kept out of training; their prompts are what is decoded in the end.

Command: python examples/03_train_drafter.py --target stories260K
Hardware and time: two CPU cores, two and a half minutes for a target of 260,000 weights such as `stories260K` (a public checkpoint trained on
TinyStories, not part of this repository). `--tiny` takes a random target instead, and seconds.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from transformers_falcon_spec import FalconSpecDrafter, cli
from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.training.regenerate import RegenerateOptions, regenerate

PLAIN_TEXT = (  # a prompt, and what follows it
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
TRAINING = [
    "--per_device_train_batch_size",
    "16",
    "--max_length",
    "320",
    "--report_to",
    "none",
    "--save_strategy",
    "no",
    "--resume_from_checkpoint",  # a drafter of an earlier run is written over
    "false",
]


def main() -> None:
    """Write stories, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("stories260K"), help="folder of a base model")
    parser.add_argument("--output", type=Path, default=Path("trained_drafter"), help="folder for all that is made")
    parser.add_argument("--stories", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts to decode")
    parser.add_argument("--tiny", action="store_true", help="a random target and few stories: a trial without files")
    args = parser.parse_args()
    if args.tiny:
        args.stories, args.epochs, args.prompts = 40, 1, 3
    elif not args.target.is_dir():
        sys.exit(
            f"The folder `{args.target}` does not exist. Give one with a base model by `--target`, or try `--tiny`."
        )
    set_seed(0)
    start = time.perf_counter()
    target, tokenizer = tiny_target() if args.tiny else read_target(args.target)
    for part in (target, tokenizer):
        part.save_pretrained(args.output / "target")  # with the template, for this and all other commands
    training, held_out = write_stories(target, tokenizer, args.output, args.stories)
    seconds = time.perf_counter() - start
    files = ["--target", args.output / "target", "--data", training, "--eval_data", held_out]
    files += ["--output_dir", args.output / "drafter", "--num_train_epochs", args.epochs]
    if cli.main(["train", *map(str, files), *TRAINING]):
        sys.exit(1)
    all_seconds = time.perf_counter() - start
    print(measure(target, tokenizer, args.output, args.prompts))
    print(f"Stories took {seconds:.0f} s, training {all_seconds - seconds:.0f} s.")


def read_target(folder: Path) -> tuple[Any, Any]:
    """A base model and its tokenizer, with the template above unless it has one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEXT
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def tiny_target() -> tuple[Any, Any]:
    """A random target that writes letters."""
    names = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ."]
    letters = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=PLAIN_TEXT
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(names), pad_token_id=0, **sizes)).eval(), tokenizer


def write_stories(target: Any, tokenizer: Any, folder: Path, num_stories: int) -> tuple[Path, Path]:
    """Files of stories to train on and of others, each cut behind its first sentence."""
    options = RegenerateOptions(max_new_tokens=256, batch_size=64, temperature=1.0)
    regenerate(target, tokenizer, [turns("", "")] * num_stories, folder / "stories.jsonl", options)
    texts = {line["messages"][1]["content"].strip() for line in read_lines(folder / "stories.jsonl")}
    pairs = [text.partition(".") for text in sorted(texts)]
    rows = [turns(opening + stop, rest) for opening, stop, rest in pairs if rest]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    num_held_out = len(order) // 10
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, numbers in zip(files, (order[num_held_out:], order[:num_held_out]), strict=True):
        lines = [json.dumps({"messages": rows[number]}) + "\n" for number in numbers]
        file.write_text("".join(lines), encoding="utf-8")
    return files


def turns(prompt: str, answer: str) -> list[dict[str, str]]:
    """A conversation."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def read_lines(file: Path) -> list[Any]:
    """What a JSON lines file holds."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def measure(target: Any, tokenizer: Any, folder: Path, num_prompts: int) -> str:
    """What the real loop keeps, and how fast it is beside the target alone: held-out prompts, greedily, in turn."""
    drafter = FalconSpecDrafter.from_pretrained(folder / "drafter").eval()
    drafter.generation_config.tune = False  # it drafts in every step, whatever the clock says
    known = {line["messages"][0]["content"] for line in read_lines(folder / "train.jsonl")}
    openings = dict.fromkeys(line["messages"][0]["content"] for line in read_lines(folder / "held_out.jsonl"))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": opening}], return_dict=True)["input_ids"]
        for opening in openings
        if opening not in known
    ][:num_prompts]
    stats = GenerationStats()
    plain_tokens, plain_seconds = 0, 0.0
    for number, prompt in enumerate(prompts):
        ids, greedy = torch.tensor([prompt]), {"do_sample": False}
        if number == 0:
            timed_generate(target, ids, 4, greedy, 0, drafter)  # untimed: the target is probed once
        stats += timed_generate(target, ids, 128, greedy, 0, drafter).output.speculation
        plain = timed_generate(target, ids, 128, greedy, 0)
        plain_tokens += len(plain.new_ids)
        plain_seconds += plain.seconds

    return (
        f"{stats.num_tokens} tokens after {len(prompts)} held-out prompts, greedy: acceptance length "
        f"{stats.acceptance_length:.2f}, speed-up {stats.tokens_per_second * plain_seconds / plain_tokens:.2f}"
    )


if __name__ == "__main__":
    main()
