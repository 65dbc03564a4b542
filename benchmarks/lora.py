"""A drafter for a target that was fine-tuned: acceptance as published, after LoRA, after training all its weights, and of a fresh one.

Command: python -m benchmarks.lora
Hardware and time: two CPU cores, about ten minutes. Every stage is kept in `--runs`: run it again to go on. Writes
`benchmarks/results/lora.json`, which `python -m benchmarks.report` renders into docs/train_your_own.md. `--tiny` makes everything small, in seconds.

The embedded target is fine-tuned on orders (`benchmarks/orders.py`) and answers further questions about them itself. On those answers
each variant is trained for the same steps; the acceptance is that of trees of 16 nodes in one pass, untuned, on questions that nobody saw.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

from benchmarks.orders import Conversation, conversations
from benchmarks.report import Report, Result, source_line, table
from benchmarks.training_runs import folder_of
from transformers_falcon_spec import SpeculationConfig, cli
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.errors import FalconSpecError
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import summarize
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.checkpoints import newest_complete_checkpoint
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.feature_cache import FeatureCache
from transformers_falcon_spec.training.features import TargetFeatures

HERE = Path(__file__).parent
BEFORE = "as published"
FRESH_FIELDS = ("block_size", "recurrence", "shortcut", "newest_row", "attention_bias", "transition_rank")
LORA = ("--use_peft", "--lora_r", "16", "--lora_alpha", "32", "--learning_rate", "2e-3")
VARIANTS: dict[str, tuple[str, ...]] = {
    "LoRA, rank 16": LORA,
    "LoRA, rank 16, and the LSTM as a whole": (*LORA, "--lora_modules_to_save", "recurrence"),
    "all weights": ("--learning_rate", "1e-3"),
    "all weights of a fresh drafter": ("--method", "falcon", "--learning_rate", "2e-3"),
}
SHARED = {
    "per_device_train_batch_size": "8",
    "warmup_steps": "20",
    "lr_scheduler_type": "cosine",
    "feature_loss_weight": "0.1",
    "token_loss_weight": "1.0",
    "use_glancing": "false",
    "use_cpu": "true",
    "disable_tqdm": "true",
    "report_to": "none",
    "save_steps": "100",
    "save_total_limit": "1",
    "logging_steps": "50",
}
SIZES = {"rows": 800, "held_out": 64, "prompts": 40, "tune_steps": 300, "steps": 300, "max_new_tokens": 160}
TINY = {"rows": 16, "held_out": 4, "prompts": 2, "tune_steps": 2, "steps": 2, "max_new_tokens": 12}
OPTIONS = SpeculationConfig(tune=False, dynamic_tree=True, num_tree_nodes=16)


class Stages:
    """What was done, each stage once, and the seconds that it took."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stages.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}

    def once(self, name: str, work: Callable[[], None]) -> None:
        """Do what was not done yet."""
        if name not in self.seconds:
            start = time.perf_counter()
            work()
            self.seconds[name] = time.perf_counter() - start
            self.path.write_text(json.dumps(self.seconds, indent=1), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune the target, let it answer, train every variant, measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", default="models/falcon-reference")
    parser.add_argument("--runs", type=Path, default=Path("runs/lora"), help="where models and runs are kept")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "lora.json")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    args = parser.parse_args(argv)
    sizes, stages = TINY if args.tiny else SIZES, Stages(args.runs)
    questions = conversations(sizes["tune_steps"] * 8 + sizes["rows"] + sizes["held_out"] + sizes["prompts"], seed=0)
    parts = {}
    for name in ("prompts", "held_out", "rows"):
        parts[name], questions = questions[: sizes[name]], questions[sizes[name] :]
    stages.once("fine-tuning of the target", lambda: fine_tune(args, questions, sizes))
    write_questions(args.runs, parts)
    for name in ("rows", "held_out"):
        stages.once(f"answers of the target, {name}", lambda name=name: answer(args.runs, name, sizes))
    stages.once("its features", lambda: read_features(args.runs))
    for name, options in VARIANTS.items():
        stages.once(name, lambda name=name, options=options: train(args, name, options, sizes))
    result = {
        "provenance": provenance(
            seed=0, **{name: str(value) for name, value in vars(args).items()}, **sizes, **SHARED
        ),
        "stage_seconds": stages.seconds,
        "rows": measure(args, sizes),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        lengths = ", ".join(f"{name} {found['acceptance_length']:.2f}" for name, found in row["acceptance"].items())
        print(f"{row['name']:40s} {lengths}")


def fine_tune(args: argparse.Namespace, rows: list[Conversation], sizes: dict[str, int]) -> None:
    """Teach the target the domain: all its weights, next-token loss on the answers; interrupted, it goes on."""
    set_seed(0)
    target, tokenizer = load_target(args.target, "float32", "cpu")
    data = [
        {
            "input_ids": each["input_ids"],
            "labels": [
                token if is_counted else -100
                for token, is_counted in zip(each["input_ids"], each["assistant_mask"], strict=True)
            ],
        }
        for each in ConversationDataset(rows, tokenizer, 512).examples
    ]
    folder = str(args.runs / "fine-tuning")
    options = TrainingArguments(
        folder, max_steps=sizes["tune_steps"], per_device_train_batch_size=8, learning_rate=1e-3, warmup_steps=20,
        lr_scheduler_type="cosine", train_sampling_strategy="group_by_length", save_steps=50, save_total_limit=1,
        logging_steps=50, use_cpu=True, disable_tqdm=True, report_to="none",
    )  # fmt: skip
    trainer = Trainer(target.train(), options, DataCollatorForSeq2Seq(tokenizer), data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=newest_complete_checkpoint(folder))
    target.save_pretrained(args.runs / "target")
    tokenizer.save_pretrained(args.runs / "target")


def write_questions(runs: Path, parts: dict[str, list[Conversation]]) -> None:
    """Conversations to be answered, and prompts to be drafted for."""
    for name, rows in parts.items():
        lines = [
            {"id": f"orders/{number}", "prompt": row[0]["content"]} if name == "prompts" else {"messages": row}
            for number, row in enumerate(rows)
        ]
        file = runs / ("orders.jsonl" if name == "prompts" else f"{name}.jsonl")
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def answer(runs: Path, name: str, sizes: dict[str, int]) -> None:
    """Let the fine-tuned target answer the questions; interrupted, it goes on."""
    run_command(
        "regenerate", "--target", str(runs / "target"), "--data", str(runs / f"{name}.jsonl"),
        "--output", str(runs / f"answered-{name}.jsonl"), "--max_new_tokens", str(sizes["max_new_tokens"]),
    )  # fmt: skip


def read_features(runs: Path) -> None:
    """The target's features, once for all variants."""
    target, tokenizer = load_target(str(runs / "target"), "float32", "cpu")
    rows = read_conversations([str(runs / "answered-rows.jsonl")]).rows
    FeatureCache(ConversationDataset(rows, tokenizer, 512), TargetFeatures(target, (-1,), 1), runs / "features")


def train(args: argparse.Namespace, name: str, options: Sequence[str], sizes: dict[str, int]) -> None:
    """One variant; interrupted, it goes on from its newest checkpoint."""
    start = ["--drafter", args.drafter]
    if "--method" in options:
        config = AutoConfig.from_pretrained(args.drafter)
        fields = [f"{field}={json.dumps(getattr(config, field))}" for field in FRESH_FIELDS]
        start = ["--drafter_config", *fields]
    shared = [part for option, value in SHARED.items() for part in (f"--{option}", value)]
    run_command(
        "train", "--target", str(args.runs / "target"), "--data", str(args.runs / "answered-rows.jsonl"),
        "--eval_data", str(args.runs / "answered-held_out.jsonl"), "--cache_features", str(args.runs / "features"),
        "--output_dir", str(folder_of(args.runs, name)), "--max_steps", str(sizes["steps"]),
        "--resume_from_checkpoint", "true", *start, *options, *shared,
    )  # fmt: skip


def run_command(*command: str) -> None:
    """A `falcon-spec` command in this process."""
    if cli.main(list(command)) != 0:
        raise FalconSpecError(f"`falcon-spec {' '.join(command)}` must succeed, but it did not; it said why.")


def measure(args: argparse.Namespace, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Acceptance of every variant on questions that nobody saw, beside what it took."""
    target, tokenizer = load_target(str(args.runs / "target"), "float32", "cpu")
    folders = {BEFORE: Path(args.drafter), **{name: folder_of(args.runs, name) for name in VARIANTS}}
    benchmark = Benchmark(
        target,
        tokenizer,
        [
            with_drafter(name, with_options(load_drafter(str(folder), target), OPTIONS))
            for name, folder in folders.items()
        ],
        read_prompts([str(args.runs / "orders.jsonl")]),
        ["greedy", "temperature-0.7"],
        max_new_tokens=sizes["max_new_tokens"],
    )
    found = summarize(benchmark.run(args.runs / "acceptance.jsonl").complete())
    return [
        {
            "name": name,
            "acceptance": {row["decoding"]: acceptance(row) for row in found if row["method"] == name},
            **({"num_trained": 0, "bytes": 0, "seconds": 0.0} if name == BEFORE else cost(folder)),
        }
        for name, folder in folders.items()
    ]


def acceptance(row: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of a variant's texts."""
    return {
        "acceptance_length": row["acceptance_length_pooled"],
        "acceptance_length_interval": row["acceptance_length_pooled_interval"],
        "num_identical": row["num_identical"],
        "num_prompts": row["num_prompts"],
    }


def cost(folder: Path) -> dict[str, Any]:
    """Seconds of training, bytes of the weights that were saved, and how many numbers they are."""
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    weights = next(
        path for path in (folder / "adapter_model.safetensors", folder / "model.safetensors") if path.is_file()
    )
    last = next(entry for entry in reversed(record["curve"]) if "eval_accuracy" in entry)
    return {
        "seconds": record["train_seconds"],
        "bytes": weights.stat().st_size,
        "num_trained": record["num_trained"],
        "command": record["command"],
        "accuracy": [value for name, value in last.items() if name.startswith("eval_accuracy_at_")],
    }


def tables(result: Result, path: str) -> list[str]:
    """Acceptance before and after, minutes, and what is saved."""
    origin, seconds, rows = result["provenance"], result["stage_seconds"], result["rows"]
    found = [each for row in rows for each in row["acceptance"].values()]
    names = {row["name"] for row in rows}
    shared = sum(taken for what, taken in seconds.items() if what not in names and not what.startswith("fine-tuning"))
    columns = {
        "drafter": "{name}",
        **{
            f"acceptance length, {decoding}": f"{{acceptance/{decoding}/acceptance_length:.2f}} "
            f"({{acceptance/{decoding}/acceptance_length_interval:~.2f}})"
            for decoding in rows[0]["acceptance"]
        },
        "weights trained": "{num_trained:1e-6*.2f} M",
        "saved": "{bytes:1e-6*.1f} MB",
        "training": "{minutes:.1f} min",
    }
    shown = [
        {**row, "minutes": row["seconds"] / 60} if row["num_trained"] else {**row, "num_trained": None, "bytes": None}
        for row in rows
    ]
    lead = (
        f"The embedded target after {origin['tune_steps']} steps on made-up orders in JSON, SQL and tables; {origin['rows']} of its own answers, "
        f"{origin['steps']} steps of\n"
        f"{origin['per_device_train_batch_size']} for each way; trees of 16 nodes in one pass (so at most 4 tokens a step), not tuned, on {origin['prompts']} unseen questions (95 % interval). "
        f"{sum(each['num_identical'] for each in found)} of {sum(each['num_prompts'] for each in found)} texts are the target's own. Answers\n"
        f"and features, which all ways share, took {shared / 60:.1f} min."
    )
    return ["### A target fine-tuned on another domain", lead, table(columns, shown), source_line(result, path)]


REPORT = Report("docs/train_your_own.md", ["lora.json"], tables, order=3)


if __name__ == "__main__":
    main()
