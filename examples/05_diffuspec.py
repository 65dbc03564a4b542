"""DiffuSpec: a small masked diffusion model, made of some of a target's layers and trained to fill in what the target says.

Command: python examples/05_diffuspec.py --data runs/data/answered.jsonl
The data are conversations that the target answered: `falcon-spec regenerate` writes them. `falcon-spec train --method diffusion` does
the same from the command line, with evaluation, checkpoints and a record.
Hardware and time: two CPU cores, two to three steps a second with the target in `models/`; a useful drafter takes some thousands of
them. `--tiny` makes random models, three steps and a few rows instead.
"""

from pathlib import Path

from pair import PROMPT, question_ids, read_target, target_options
from transformers import set_seed

from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.dataset import ConversationCollator, ConversationDataset
from transformers_falcon_spec.training.trainer import DrafterTrainer

TINY_ROWS = [
    [{"role": "user", "content": f"{i} plus 1?"}, {"role": "assistant", "content": f"It is {i + 1}."}]
    for i in range(16)
]


def main() -> None:
    """Make a drafter, train it, save it, load it as its users do, and write a text with it."""
    parser = target_options(__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path("runs/data/answered.jsonl"), help="conversations, JSON lines"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/diffusion"), help="folder to write to")
    parser.add_argument("--layers", type=int, default=2, help="of the target's")
    parser.add_argument("--block", type=int, default=4, help="tokens that are filled in at once")
    parser.add_argument("--search", default="tree", help="what is drafted of them: cps, tree")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a conversation")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch, args.max_new_tokens = 3, 2, 16
    set_seed(0)
    target, tokenizer = read_target(args)
    rows = TINY_ROWS if args.tiny else read_conversations(args.data).rows
    drafter = DiffusionDrafter.from_target(
        target, num_hidden_layers=args.layers, attention="prefix_causal", block_size=args.block, search=args.search
    )
    arguments = DrafterTrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        num_anchors=8,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 40,
        logging_steps=max(args.steps // 20, 1),
        save_strategy="no",
        report_to="none",
        use_cpu=args.device == "cpu",
    )
    trainer = DrafterTrainer(
        target=target,
        model=drafter,
        args=arguments,
        train_dataset=ConversationDataset(rows, tokenizer, args.length),
        data_collator=ConversationCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
    trainer.train()
    drafter.save_pretrained(args.output)

    drafter = DiffusionDrafter.from_pretrained(args.output, target=target).eval()
    ids = question_ids(tokenizer, args.prompt).to(target.device)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)
    print(tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True))
    same = "the same text" if out.sequences.equal(target.generate(ids, **options)) else "another text"
    print(f"{same} as the target alone, acceptance length {out.speculation.acceptance_length:.2f}")


if __name__ == "__main__":
    main()
