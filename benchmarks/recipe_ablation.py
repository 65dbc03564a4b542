"""The default recipe with one thing changed at a time, beside the paper's and Eagle-3: the same data and steps for all, then decoded with.

Command: python -m benchmarks.recipe_ablation --data answered.jsonl --eval_data answered-held_out.jsonl
Hardware and time: two CPU cores. What is missing is trained, two at a time with one thread each, about an hour; then, unless
`--only_train` is given, all arms are timed on held-out prompts, which takes ten minutes with nothing else running. Resumes. Writes
`benchmarks/results/recipe_ablation.json`, which `falcon-spec report` renders into docs/train_your_own.md.

Trees are grown, with the same nodes for all and as many passes as an arm is allowed; nothing is tuned. `benchmarks/falcon_objectives.py`
holds what the package itself does not offer.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.running import Runs, beside, by_arm, run_and_save
from benchmarks.training_runs import folder_of, run_command
from benchmarks.training_table import outcome_of
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import Method, with_drafter, with_options
from transformers_falcon_spec.evaluation.prompts import read_prompts

HERE = Path(__file__).parent
DEFAULT = "default"


@dataclass(frozen=True)
class Arm:
    """One training, and the passes of the drafter with which it is decoded."""

    options: str = ""  # of `falcon-spec train`
    objective: str | None = None  # of `benchmarks/falcon_objectives.py`, in place of Falcon's own
    features: str | None = "features"  # folder that keeps what it reads of the target; None reads it on the way
    passes: tuple[int, ...] = (1,)


EAGLE = "--method eagle --learning_rate 2e-3 --warmup_steps 0.025 --lr_scheduler_type cosine --ttt_steps 4 --drafter_config version=3"
ARMS = {
    DEFAULT: Arm(passes=(1, 2)),
    "Eagle-3, 2,048 tokens drafted": Arm(f"{EAGLE} draft_vocab_size=2048", features="features_eagle", passes=(3, 6)),
    "paper": Arm("--recipe paper", passes=(1, 2)),
    "recurrence along the sequence": Arm("--drafter_config recurrence=sequence"),
    "blocks at a fixed phase": Arm(objective="fixed_phase"),
    "glancing, 0.4 falling to 0": Arm("--use_glancing true --glancing_ratio 0.4"),
    "glancing, 0.4 held": Arm("--use_glancing true --glancing_ratio 0.4", objective="held_glancing"),
    "no feature loss": Arm("--feature_loss_weight 0"),
    "feature loss of weight 1": Arm("--feature_loss_weight 1"),
    "KL alone": Arm(objective="forward_kl"),
    "cross-entropy alone": Arm(objective="cross_entropy"),
    "reverse KL": Arm(objective="reverse_kl"),
    "places by their chance to be reached": Arm(objective="by_reach"),
    "fed its own features": Arm(objective="own_features", passes=(1, 2)),
    "features of layers 3, 7 and the last": Arm("--drafter_config feature_layers=[3,7,-1]", features=None),
    "no transition": Arm("--drafter_config transition_rank=null"),
    "no map of the newest row": Arm("--drafter_config newest_row=false"),
    "no shortcut": Arm("--drafter_config shortcut=false"),
    "two layers": Arm("--drafter_config num_hidden_layers=2"),
    "Eagle-3, all tokens drafted": Arm(EAGLE, features="features_eagle", passes=(6,)),
}
SHARED = (
    "--target_dtype bfloat16 --bf16 --use_cpu --per_device_train_batch_size 8 --save_steps 250 --save_total_limit 1 --logging_steps 50 "
    "--report_to none --disable_tqdm true --eval_decode_prompts 0 --seed 42 --resume_from_checkpoint true"
)


def main() -> None:
    """Train what is missing; then time every arm beside the default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--data", required=True, help="answered conversations to train on")
    parser.add_argument("--eval_data", required=True, help="answered conversations held out")
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument(
        "--arms", nargs="+", default=[*ARMS], choices=[*ARMS], metavar="ARM", help="the default comes first"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe_ablation"), help="where drafters are kept")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only_train", action="store_true", help="stop before anything is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "recipe_ablation.json")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.workers) as pool:
        for names in (readers(args.arms), args.arms):
            list(pool.map(lambda name: train(name, args), names))
    if not args.only_train:
        measure(args)


def readers(names: list[str]) -> list[str]:
    """The first arm of each folder of features: it writes what the others read, so it must have ended before they start."""
    return [*{ARMS[name].features: name for name in reversed(names)}.values()]


def train(name: str, args: argparse.Namespace) -> None:
    """One arm, unless it is there; interrupted, it goes on from its newest checkpoint."""
    folder, arm = folder_of(args.runs, name), ARMS[name]
    if (folder / "training.json").is_file():
        return
    cache = [] if arm.features is None else ["--cache_features", str(args.runs / arm.features)]
    command = [
        "train", "--target", args.target, "--data", args.data, "--eval_data", args.eval_data, "--output_dir", str(folder),
        "--max_steps", str(args.steps), *cache, *SHARED.split(), *arm.options.split(),
    ]  # fmt: skip
    if arm.objective is None:
        run_command(folder, *command)
    else:
        run_command(folder, arm.objective, *command, module="benchmarks.falcon_objectives")


def measure(args: argparse.Namespace) -> None:
    """Decode with all arms, prompt by prompt in turn."""
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.target, "float32", "cpu")
    methods = [method for name in args.arms for method in decoded(name, target, args)]
    prompts = read_prompts([args.prompts], args.limit)
    benchmark = Benchmark(target, tokenizer, methods, prompts, args.decodings, args.max_new_tokens)
    trained = [outcome_of(f"{name}={folder_of(args.runs, name)}") for name in args.arms]
    first = methods[0].name
    run_and_save(
        benchmark, args.output, args, lambda runs: {"trained": trained, "beside": beside_default(runs, first)}
    )


def decoded(name: str, target: Any, args: argparse.Namespace) -> list[Method]:
    """The drafter of an arm, with each number of passes that it is decoded with."""
    drafter = load_drafter(str(folder_of(args.runs, name)), target)
    shapes = {
        passes: {"num_tree_nodes": args.nodes, "tree_depth": passes * drafter.block_size}
        for passes in ARMS[name].passes
    }
    return [
        with_drafter(
            arm_name(name, passes), with_options(drafter, SpeculationConfig(tune=False, dynamic_tree=True, **shape))
        )
        for passes, shape in shapes.items()
    ]


def arm_name(name: str, passes: int) -> str:
    """An arm as tables call it."""
    return f"{name}; {passes}"


def beside_default(records: Runs, first: str) -> list[dict[str, Any]]:
    """How many times as fast every arm is as the first one, on all prompts."""
    return [
        {"decoding": decoding, "arm": arm, **beside(runs, found[first])}
        for decoding, found in by_arm(records).items()
        for arm, runs in found.items()
        if "; " in arm
    ]


if __name__ == "__main__":
    main()
