"""Two ablations on the reference target: the paper's own (chain and tree, with CSGD and without it), and the forms of a drafter.

Command: python -m benchmarks.ablation --only csgd --data answers.jsonl --eval_data held_out.jsonl
Hardware and time: two CPU cores, `--workers` drafters at a time with one thread each. `csgd` trains two drafters by `--recipe paper`, loss
weights, rate and form included; `forms` trains seven, and says beside its table what it changes for all of them. What is trained and
measured already is kept, and a training that was interrupted goes on from its newest checkpoint: run it again. Writes
`benchmarks/results/ablation_csgd.json` and `ablation.json`, which `python -m benchmarks.report` renders into docs/train_your_own.md.
"""

import argparse
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.report import Report, Result, named, source_line, table
from benchmarks.training_runs import folder_of, run_command
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.drafters.falcon import FalconSpecConfig
from transformers_falcon_spec.drafters.falcon.paper_tree import PAPER_DEPTH, paper_tree
from transformers_falcon_spec.generation.options import SpeculationConfig
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.feature_cache import FeatureCache
from transformers_falcon_spec.training.features import TargetFeatures
from transformers_falcon_spec.training.recipes import recipe_of

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
SHARED = {
    "recipe": "paper",
    "eval_decode_prompts": "0",  # decoded on the test sets below
    "per_device_train_batch_size": "4",
    "use_cpu": "true",
    "disable_tqdm": "true",
    "report_to": "none",
    "save_steps": "250",
    "save_total_limit": "1",
    "logging_steps": "50",
}
TREE_DEPTH = 4  # of trees that are fitted: drafter passes are as many as this depth needs


@dataclass(frozen=True)
class Ablation:
    """Drafters that differ in one thing.

    Args:
        points (`dict`): What each changes of the recipe.
        overrides (`dict`): What all of them change of it.
        trees (`dict`): Static trees that each drafts; one that is None is fitted to the held-out answers.
        output (`str`): The results file.
        description (`list[str]`): What the table shows.
    """

    points: Mapping[str, Mapping[str, str]]
    overrides: Mapping[str, str]
    trees: Mapping[str, DraftTree | None]
    output: str
    description: list[str]


CSGD = Ablation(
    points={"without CSGD": {"use_glancing": "false"}, "CSGD": {}},
    overrides={},
    trees={"chain": DraftTree.chain(PAPER_DEPTH), "tree": paper_tree()},
    output="ablation_csgd.json",
    description=[
        f"By `--recipe paper`: its drafter, its loss weights, its rate. A chain of {PAPER_DEPTH} tokens and figure 6's tree of 118, both in",
        "four passes. Acceptance length (95 % interval) at temperature 0.7 on the test sets; accuracy on held-out answers.",
    ],
)
FORMS = Ablation(
    points={
        "k = 2 (sequence, 1 block, CSGD)": {"block_size": "2"},
        "k = 1": {"block_size": "1"},
        "k = 3": {"block_size": "3"},
        "k = 4": {"block_size": "4"},
        "k = 2, recurrence token": {"block_size": "2", "recurrence": "token"},
        "k = 2, 2 blocks": {"block_size": "2", "num_hidden_layers": "2"},
        "k = 2, without CSGD": {"block_size": "2", "use_glancing": "false"},
    },
    overrides={
        "num_hidden_layers": "1",
        "block_position_embedding": "true",
        "attention_bias": "true",
        "learning_rate": "2e-3",
        "warmup_steps": "30",
        "feature_loss_weight": "0.1",
        "token_loss_weight": "1.0",
        "target_dtype": "bfloat16",
        "bf16": "true",
        "draft_tree_nodes": "16",
    },
    trees={"": None},
    output="ablation.json",
    description=[
        f"Trees of 16 nodes fitted to held-out text, drafted in as many passes as a depth of {TREE_DEPTH} needs. Acceptance length",
        "(95 % interval) at temperature 0.7 on the test sets; accuracy on held-out answers.",
    ],
)
ABLATIONS = {"csgd": CSGD, "forms": FORMS}


def main() -> None:
    """Train, measure and collect every point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ABLATIONS), choices=list(ABLATIONS))
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--data", nargs="+", required=True, help="answered conversations to train on")
    parser.add_argument("--eval_data", required=True, help="answered conversations held out")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each test set")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="where drafters and runs are kept")
    parser.add_argument("--features", default="runs/features", help="where the target's features are kept")
    parser.add_argument("--num_conversations", type=int, help="train on the first of them only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    for name in args.only:
        run(ABLATIONS[name], args)


def run(ablation: Ablation, args: argparse.Namespace) -> None:
    """One of the two, into its results file."""
    extract(args, ablation.overrides.get("target_dtype", "auto"))
    with ThreadPoolExecutor(args.workers) as pool:
        points = list(pool.map(lambda name: measure(name, ablation, args), ablation.points))
    given = {name: str(value) for name, value in vars(args).items()}
    result = {
        "provenance": provenance(seed=0, **given, **SHARED, **ablation.overrides),
        "description": [*ablation.description, *described(ablation, args.steps)],
        "sets": list(SETS),
        "points": [row for rows in points for row in rows],
    }
    (args.results / ablation.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def described(ablation: Ablation, steps: int) -> list[str]:
    """How long all were trained, and what they change of the recipe."""
    lines = [f"The same data for all, {steps} steps of 4 conversations each."]
    if ablation.overrides:
        changes = " ".join(f"{name}={value}" for name, value in ablation.overrides.items())
        lines.append(f"Not by the recipe `paper` alone; all are trained with `{changes}`.")
    return lines


def extract(args: argparse.Namespace, dtype: str) -> None:
    """The target's features, once for all points; to be quicker, run `train --cache_features` under `torchrun` before."""
    target, tokenizer = load_target(args.target, dtype, "cpu")
    rows = read_conversations(args.data, args.num_conversations).rows
    dataset = ConversationDataset(rows, tokenizer, DrafterTrainingArguments.max_length)
    FeatureCache(dataset, TargetFeatures(target, (-1,), distance=1), args.features)


def measure(name: str, ablation: Ablation, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each tree of a point, from its files where they exist."""
    folder = folder_of(args.runs, name)
    settings = {**SHARED, **ablation.overrides, **ablation.points[name], "max_steps": str(args.steps)}
    if not (folder / "training.json").is_file():
        train(folder, settings, args)
    block_size = int(settings.get("block_size", recipe_of("paper", "falcon").drafter_config["block_size"]))
    return [
        {
            "name": f"{tree_name}, {name}" if tree_name else name,
            "num_parameters": _num_parameters(folder),
            "acceptance": decoded(folder, tree_name, tree, args),
            "accuracy_by_block_position": _accuracy(folder, block_size),
        }
        for tree_name, tree in ablation.trees.items()
    ]


def train(folder: Path, settings: dict[str, str], args: argparse.Namespace) -> None:
    """Train the drafter of a point, or go on with it."""
    if "draft_tree_nodes" in settings:
        settings["draft_tree_passes"] = str(math.ceil(TREE_DEPTH / int(settings["block_size"])))
    fields = [f"{option}={settings.pop(option)}" for option in list(settings) if hasattr(FalconSpecConfig, option)]
    flags = [part for option, value in settings.items() for part in (f"--{option}", value)]
    few = [] if args.num_conversations is None else ["--limit", str(args.num_conversations)]
    given = ["--drafter_config", *fields] if fields else []
    run_command(folder, "train", "--target", args.target, "--data", *args.data, "--eval_data", args.eval_data, *few,
         "--cache_features", args.features, "--output_dir", str(folder), "--resume_from_checkpoint", "true", *given, *flags)  # fmt: skip


def decoded(folder: Path, tree_name: str, tree: DraftTree | None, args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance length by test set, with a tree or with the drafter's own."""
    bench = folder / f"bench{tree_name and f'_{tree_name}'}.json"
    if not bench.is_file():
        prompts = [str(HERE / "prompts" / f"{name}.jsonl") for name in SETS]
        given = []
        if tree is not None:
            file = folder / f"{tree_name}.json"
            file.write_text(json.dumps(tree.to_json()), encoding="utf-8")
            given = ["--draft_tree", str(file)]
        SpeculationConfig(tune=False).save_pretrained(folder)
        run_command(folder, "bench", "--targets", args.target, "--methods", f"point={folder}", "--prompts", *prompts, "--no_baseline",
             "--decodings", "temperature-0.7", "--limit", str(args.limit), "--output", str(bench), *given)  # fmt: skip
    rows = json.loads(bench.read_text(encoding="utf-8"))["rows"]
    return {row["set"]: _length(row) for row in rows}


def _length(row: dict[str, Any]) -> dict[str, Any]:
    interval = row["acceptance_length_pooled_interval"]
    return {"acceptance_length": row["acceptance_length_pooled"], "acceptance_length_interval": interval}


def _num_parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _accuracy(folder: Path, block_size: int) -> list[float]:
    """Agreement with the target's best token on the held-out answers, by block position."""
    curve = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"]
    last = next(entry for entry in reversed(curve) if "eval_accuracy" in entry)
    return [last[f"eval_accuracy_at_{position}"] for position in range(1, block_size + 1)]


TITLES = {
    "ablation_csgd.json": "Chain and tree, with CSGD and without it, by the paper's recipe",
    "ablation.json": "Forms of a Falcon drafter",
}


def tables(result: Result, path: str) -> list[str]:
    """Drafters that differ in one thing."""
    rows = [{**point, "millions": point["num_parameters"] / 1e6} for point in result["points"]]
    columns = {
        "drafter": "{name}",
        "parameters": "{millions:.2f} M",
        **named(
            result["sets"], "{acceptance/@/acceptance_length:.2f} ({acceptance/@/acceptance_length_interval:~.2f})"
        ),
        "accuracy by block position (held-out)": "{accuracy_by_block_position:.2f}",
    }
    title, described = f"### {TITLES[Path(path).name]}", "\n".join(result["description"])
    return [title, described, table(columns, rows), source_line(result, path)]


REPORT = Report("docs/train_your_own.md", [*TITLES], tables, order=1)


if __name__ == "__main__":
    main()
