"""The quick start: one prompt with a drafter, the text as it is written, and what speculation did.

Command: python examples/01_generate.py
Hardware and time: two CPU cores, about five seconds with the pair in `models/`. `--tiny` makes a random pair instead.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer

from transformers_falcon_spec import FalconSpecDrafter


def main() -> None:
    """Write one text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--prompt", default="Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="a random pair and random ids: a trial without files")
    args = parser.parse_args()
    if args.tiny:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        target = LlamaForCausalLM(config).eval()
        drafter = FalconSpecDrafter.from_target(target).eval()
        inputs = {"input_ids": torch.arange(3, 15)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
        streamer = None
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        target = AutoModelForCausalLM.from_pretrained(args.target).eval()
        drafter = FalconSpecDrafter.from_pretrained(args.drafter).eval()
        messages = [{"role": "user", "content": args.prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    stats = out.speculation
    print(f"{stats.num_tokens} tokens in {stats.num_steps} steps; acceptance length {stats.acceptance_length:.2f}")


if __name__ == "__main__":
    main()
