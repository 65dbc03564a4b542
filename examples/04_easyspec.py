"""EasySpec: a small language model drafts, the attention of several of its layers computed at once.

Command: python examples/04_easyspec.py
With a language model of the target's family: --target Qwen/Qwen2.5-7B-Instruct --small Qwen/Qwen2.5-0.5B-Instruct --device cuda
Hardware and time: two CPU cores, about six seconds with the target in `models/`, of which 8 of its 12 layers draft without any
training. They cost nearly what the target costs, so expect acceptance and no speed. `--tiny` makes random models instead.
"""

from pair import PROMPT, question_ids, read_target, target_options
from transformers import AutoModelForCausalLM

from transformers_falcon_spec import LayerParallelDrafter
from transformers_falcon_spec.drafters.autoregressive import make_draft_model


def main() -> None:
    """Write one text with each size of groups, and compare it with the target's own."""
    parser = target_options(__doc__)
    parser.add_argument(
        "--small", help="folder or Hub name of a small language model; some of the target's layers if left out"
    )
    parser.add_argument("--layers", type=int, default=8, help="how many of them")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[1, 2, 4], help="layers that attend at once")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.group_sizes, args.max_new_tokens = 5, [1, 2], 16
    target, tokenizer = read_target(args)
    if args.small:
        small = AutoModelForCausalLM.from_pretrained(args.small, dtype=target.dtype).to(target.device)
    else:
        small = make_draft_model(target, num_hidden_layers=args.layers)
    ids = question_ids(tokenizer, args.prompt).to(target.device)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    plain = target.generate(ids, **options)
    print(tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True))
    for group_size in args.group_sizes:
        drafter = LayerParallelDrafter.wrap(small, target, group_size=group_size, target_tokenizer=tokenizer)
        drafter.generation_config.tune = False  # draft in every step, whether it pays or not
        out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
        same = "the same text" if out.sequences.equal(plain) else "another text"
        length = out.speculation.acceptance_length
        print(f"groups {drafter.config.layer_groups}: {same}, acceptance length {length:.2f}")


if __name__ == "__main__":
    main()
