"""The paper's ablation on the reference target: train every point with the same data and steps, then decode with it.

Command: python -m benchmarks.ablation --data runs/data/answers.jsonl --eval-data runs/data/answers-held_out.jsonl
Hardware and time: two CPU cores, two points at a time with one thread each, about an hour. Points that are
trained and measured already are kept: run it again to go on. Writes `benchmarks/results/ablation.json`.
"""

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.training_runs import folder_of, run_command
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.commands.train_options import TrainCommand
from transformers_falcon_spec.drafters.falcon import FalconSpecConfig
from transformers_falcon_spec.generation.options import SpeculationConfig
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.conversations import read_conversations
from transformers_falcon_spec.training.dataset import ConversationDataset
from transformers_falcon_spec.training.feature_cache import FeatureCache
from transformers_falcon_spec.training.features import TargetFeatures

HERE = Path(__file__).parent
SETS = ("gsm8k", "humaneval", "mt_bench")
POINTS: dict[str, dict[str, str]] = {
    "k = 2 (sequence, 1 block, CSGD)": {"block_size": "2"},
    "k = 1": {"block_size": "1"},
    "k = 3": {"block_size": "3"},
    "k = 4": {"block_size": "4"},
    "k = 2, recurrence token": {"block_size": "2", "recurrence": "token"},
    "k = 2, 2 blocks": {"block_size": "2", "num_hidden_layers": "2"},
    "k = 2, without CSGD": {"block_size": "2", "use_glancing": "false"},
}
SHARED = {
    "recipe": "paper",
    "block_position_embedding": "true",
    "eval_decode_prompts": "0",  # decoded on the test sets below
    "per_device_train_batch_size": "4",
    "learning_rate": "2e-3",
    "warmup_steps": "30",
    "feature_loss_weight": "0.1",
    "token_loss_weight": "1.0",
    "attention_bias": "true",
    "target_dtype": "bfloat16",
    "bf16": "true",
    "use_cpu": "true",
    "disable_tqdm": "true",
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": "50",
    "draft_tree_nodes": "16",
}
TREE_DEPTH = 4  # drafter passes are as many as this depth needs
DESCRIPTION = [
    "Same data and steps for every point; trees of 16 nodes fitted to held-out text, drafted in as many passes as a depth of",
    "4 needs. Acceptance length (95 % interval) at temperature 0.7 on the test sets; accuracy on held-out answers.",
]


def main() -> None:
    """Train, measure and collect every point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--data", nargs="+", required=True, help="answered conversations to train on")
    parser.add_argument("--eval-data", required=True, help="answered conversations held out")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each test set")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="where drafters and runs are kept")
    parser.add_argument("--features", default="runs/features", help="where the target's features are kept")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    _extract(args)
    with ThreadPoolExecutor(args.workers) as pool:
        points = list(pool.map(lambda item: _point(*item, args), POINTS.items()))
    result = {
        "provenance": provenance(seed=0, **{name: str(value) for name, value in vars(args).items()}, **SHARED),
        "description": [*DESCRIPTION, f"Each point: {args.steps} steps of 4 conversations."],
        "sets": list(SETS),
        "points": points,
    }
    (HERE / "results" / "ablation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _extract(args: argparse.Namespace) -> None:
    """The target's features, once for all points; to be quicker, run `train --cache_features` under `torchrun` before."""
    target, tokenizer = load_target(args.target, SHARED["target_dtype"], "cpu")
    dataset = ConversationDataset(read_conversations(args.data).rows, tokenizer, TrainCommand.max_length)
    FeatureCache(dataset, TargetFeatures(target, (-1,), distance=1), args.features)


def _point(name: str, options: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """One point, from its files where they exist."""
    folder = folder_of(args.runs, name)
    if not (folder / "training.json").is_file():
        passes = math.ceil(TREE_DEPTH / int(options["block_size"]))
        settings = {**SHARED, **options, "max_steps": str(args.steps), "draft_tree_passes": str(passes)}
        fields = [f"{option}={settings.pop(option)}" for option in list(settings) if hasattr(FalconSpecConfig, option)]
        flags = [part for option, value in settings.items() for part in (f"--{option}", value)]
        run_command(folder, "train", "--target", args.target, "--data", *args.data, "--eval_data", args.eval_data,
             "--cache_features", args.features, "--output_dir", str(folder), "--drafter_config", *fields, *flags)  # fmt: skip
    bench = folder / "bench.json"
    if not bench.is_file():
        prompts = [str(HERE / "prompts" / f"{name}.jsonl") for name in SETS]
        SpeculationConfig(tune=False).save_pretrained(folder)
        run_command(folder, "bench", "--targets", args.target, "--methods", f"point={folder}", "--prompts", *prompts, "--no_baseline",
             "--decodings", "temperature-0.7", "--limit", str(args.limit), "--output", str(bench))  # fmt: skip
    rows = json.loads(bench.read_text(encoding="utf-8"))["rows"]
    return {
        "name": name,
        "num_parameters": _num_parameters(folder),
        "acceptance": {row["set"]: _length(row) for row in rows},
        "accuracy_by_block_position": _accuracy(folder, int(options["block_size"])),
    }


def _length(row: dict[str, Any]) -> dict[str, Any]:
    interval = row["acceptance_length_pooled_interval"]
    return {"acceptance_length": row["acceptance_length_pooled"], "acceptance_length_interval": interval}


def _num_parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _accuracy(folder: Path, block_size: int) -> list[float]:
    """Agreement with the target's best token on the held-out answers, by place in the block."""
    curve = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"]
    last = next(entry for entry in reversed(curve) if "eval_accuracy" in entry)
    return [last[f"eval_accuracy_at_{place + 1}"] for place in range(block_size)]


if __name__ == "__main__":
    main()
