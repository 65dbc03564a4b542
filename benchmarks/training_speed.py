"""What a training step costs: features read on the way or from disk, one process or two, in turn.

Command: python -m benchmarks.training_speed --data answered.jsonl
Hardware and time: two CPU cores and nothing else running, about six minutes. Every run is a `falcon-spec train` of its own on one thread,
which counts its tokens itself (`training.json`); Linux says what memory its largest process took. Writes `benchmarks/results/training_speed.json`, which `python -m benchmarks.report`
renders into docs/results.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, Result, source_line, table
from benchmarks.running import Turns, times_as_fast
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
ROWS = 8  # conversations of a step
SHARED = (
    "--target_dtype bfloat16 --bf16 --use_cpu --save_strategy no --logging_steps 50 --report_to none --disable_tqdm true "
    "--seed 42 --include_num_input_tokens_seen non_padding"
)
VARIANTS = {  # processes, and whether features come from disk
    "on the way, one process": (1, False),
    "from disk, one process": (1, True),
    "on the way, two processes": (2, False),
    "from disk, two processes": (2, True),
}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # a tenth less time a step
Told = dict[str, Any]


def main() -> None:
    """Every variant in every turn, after one that writes the features."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--data", required=True, help="answered conversations")
    parser.add_argument("--limit", type=int, default=512, help="conversations")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "training_speed.json")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        train("from disk, one process", Path(folder) / "first", args, Path(folder) / "features")
        turns = []
        for turn in range(args.repeats):
            found = {}
            for name in VARIANTS:
                found[name] = train(name, Path(folder) / str(turn), args, Path(folder) / "features")
            turns.append(found)

    origin = provenance(seed=42, **{key: str(value) for key, value in vars(args).items()})
    result = {"provenance": origin, "rows": rows_of(turns), "turns": turns}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        print(f"{row['name']:30s} {row['tokens_per_second']:.0f} tokens a second, {row['ratio']:.2f} times as fast")


def train(name: str, folder: Path, args: argparse.Namespace, features: Path) -> Told:
    """What one run records of itself."""
    processes, from_disk = VARIANTS[name]
    folder = folder / name.replace(", ", "_").replace(" ", "_")
    cache = ["--cache_features", str(features)] if from_disk else []
    command = [
        "train", "--target", args.target, "--data", args.data, "--limit", str(args.limit), "--output_dir", str(folder),
        "--max_steps", str(args.steps), "--per_device_train_batch_size", str(ROWS // processes), *cache, *SHARED.split(),
    ]  # fmt: skip
    start = ["-m", "transformers_falcon_spec"]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *start]
    peak = peak_of([*start, *command], folder / "log.txt")
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    rates = [row["train_tokens_per_second"] for row in record["curve"] if "train_tokens_per_second" in row]
    return {"train_tokens_per_second": rates[-1], "peak_process_bytes": peak}


def peak_of(arguments: list[str], log: Path) -> int:
    """Most bytes of a process of `python ARGUMENTS`, which must succeed; what it says goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **KEEP_MEMORY}
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)

    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return 1024 * usage.ru_maxrss


def rows_of(turns: list[dict[str, Told]]) -> list[dict[str, Any]]:
    """The middle run of every variant, and how many times as fast it is as the first one."""
    first = next(iter(VARIANTS))
    seconds: Turns = []
    for turn in turns:
        seconds.append({name: 1 / run["train_tokens_per_second"] for name, run in turn.items()})

    rows = []
    for name in VARIANTS:
        own = [turn[name] for turn in turns]
        rows.append(
            {
                "name": name,
                "tokens_per_second": median(run["train_tokens_per_second"] for run in own),
                "peak_process_bytes": max(run["peak_process_bytes"] for run in own),
                **times_as_fast(seconds, name, first),
            }
        )

    return rows


def tables(result: Result, path: str) -> list[str]:
    """What a training step costs: tokens a second, memory, and each way beside the first."""
    origin = result["provenance"]
    columns = {
        "features": "{name}",
        "tokens a second": "{tokens_per_second:.0f}",
        "memory": "{peak_process_bytes:GiB} GiB",
        "times as fast": "{ratio:.2f} ({interval:~.2f})",
    }
    lead = (
        f"The default recipe on the reference target, {origin['steps']} steps of 8 conversations, one thread a process, medians of {origin['repeats']} runs of each in turn. "
        "Memory: of a process, with the mapped pages of features."
    )
    return [lead, table(columns, result["rows"]), source_line(result, path)]


REPORT = Report("docs/results.md#training", ["training_speed.json"], tables, order=2)


if __name__ == "__main__":
    main()
