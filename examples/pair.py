"""What the examples from 05 on share: their options, and a target, its tokenizer and a drafter, from folders or random."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.evaluation.prompts import Prompt, check_lengths

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ '<user>' + m['content'] + '<assistant>' }}{% endif %}{% endfor %}"
)
PROMPT = "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?"


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and a drafter for it."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: PreTrainedModel

    def input_ids(self, question: str) -> Tensor:
        """A question as the target reads it, `[1, tokens]`."""
        return question_ids(self.tokenizer, question)

    def refusal(self, question: str, max_new_tokens: int) -> str | None:
        """Why so long an answer cannot be written, in words; None if it can."""
        try:
            check_lengths([_prompt(question)], self.tokenizer, self.target.config, max_new_tokens)
        except ConversationError as error:
            return str(error)
        return None


def question_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    """A question as the target of that tokenizer reads it, `[1, tokens]`."""
    return _prompt(question).input_ids(tokenizer)


def _prompt(question: str) -> Prompt:
    return Prompt("question", "0", (("user", question),), origin="The question")


def sampling(temperature: float) -> dict[str, Any]:
    """Options of `generate`: 0 is greedy."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}


def target_options(doc: str | None) -> argparse.ArgumentParser:
    """A parser for options of an example that reads a target."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target", help="folder or Hub name")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or auto to spread over devices")
    parser.add_argument("--tiny", action="store_true", help="random models: a trial without files")
    return parser


def pair_options(doc: str | None) -> argparse.ArgumentParser:
    """A parser for options of an example that reads a target and a drafter."""
    parser = target_options(doc)
    parser.add_argument("--drafter", default="models/falcon-reference", help="folder or Hub name")
    return parser


def read_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target that the options name, and its tokenizer."""
    return tiny_target() if args.tiny else load_target(args.target, "auto", args.device)


def read_pair(args: argparse.Namespace) -> Pair:
    """The pair that the options name."""
    target, tokenizer = read_target(args)
    if args.tiny:
        return Pair(target, tokenizer, FalconSpecDrafter.from_target(target).eval())
    return Pair(target, tokenizer, load_drafter(args.drafter, target, tokenizer))


def tiny_target() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A random Llama that reads and writes bytes."""
    torch.manual_seed(0)
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval(), tokenizer
