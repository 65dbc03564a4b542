"""What the walk of `examples/qwen3_8b.md` takes: computed for Qwen3-8B on one H100, and timed command by command on the embedded pair.

Command: python -m benchmarks.walk
Hardware and time: two CPU cores, about ten minutes. Sizes are those of models built from their configs without memory for weights. Hours are arithmetic from
the rates in `Rates`, each with its source, and are no measurement. The timed commands are those of the notebook, with the sizes of `tests/walk.py` and the
embedded target under the name of Qwen3-8B; each is a process of its own, so that it pays for its start. Writes `benchmarks/results/walk.json`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from os import times
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from benchmarks.report import Report, Result, Rows, source_line, table, total
from tests import walk
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.recipes import LOGITS_COPIES, make_drafter

HERE = Path(__file__).parent
TARGET = HERE.parent / "models" / "reference-target"
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
STARTS = {  # what is paid before any work
    "falcon-spec --help": ["-m", "transformers_falcon_spec", "--help"],
    "falcon-spec train --help": ["-m", "transformers_falcon_spec", "train", "--help"],
    "import transformers_falcon_spec": ["-c", "import transformers_falcon_spec"],
}
START = "import sys; from transformers_falcon_spec.cli import main; sys.exit(main(sys.argv[1:]))"
WITHOUT_SWITCH = {
    r"""--chat_template_kwargs '.*?'""": "",
    r', "enable_thinking": False': "",
}  # the embedded template has none


@dataclass(frozen=True)
class Rates:
    """What the arithmetic assumes: the mix of the page, an H100 SXM, and a price."""

    num_rows: int = 61_973  # of `prompts.jsonl`
    tokens_per_row: int = 1_300  # once answered; a guess that `train --dry_run` replaces
    answer_tokens_per_row: int = 950
    num_epochs: int = 3
    max_length: int = 2_048
    concurrency: int = 128  # requests at once, of 1,000 tokens in the middle
    context: int = 1_000
    peak_flops: float = 989e12  # of NVIDIA's data sheet, bfloat16, dense
    bandwidth: float = 3.35e12  # bytes a second, of the same
    flops_share: float = 0.35  # of the peak that training reaches; a usual figure
    # Of the bandwidth that decoding reaches: Qwen3-8B on vLLM and an H100 took 8.83 ms a token of 32 texts (huggingface.co/Dogacel/Qwen3-8B-DSpark).
    bandwidth_share: float = 0.7
    overhead_tokens_per_second: float = (
        55_000  # at which a pair so small that arithmetic is nothing was trained on an H100
    )
    plain_tokens_per_second: float = 30  # of the target alone in Transformers, which waits for the host; a guess
    measured_tokens: int = 120_000  # that doctor, trees, calibration, parity and benchmark write
    dollars_per_hour: float = 3.0


def meta_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Qwen3-8B and the Falcon drafter of the default recipe, without memory for their weights."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_8B, dtype="bfloat16"))
        return target, make_drafter("falcon", target, None)


def num_weights(model: PreTrainedModel, is_trained: bool = False) -> int:
    """The weights of a model, or those of them that are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad or not is_trained)


def sizes(target: PreTrainedModel, drafter: PreTrainedModel, rates: Rates) -> Rows:
    """Gigabytes on disk and in memory."""
    weights, trained, drafted = num_weights(target), num_weights(drafter, is_trained=True), num_weights(drafter)
    row = 4 * LOGITS_COPIES * QWEN3_8B["vocab_size"] * rates.max_length
    tokens = rates.num_rows * rates.tokens_per_row
    of_target = f"Qwen3-8B, {weights / 1e9:.2f} billion weights in bfloat16, on disk and on the GPU"
    of_drafter = (
        f"the drafter, {drafted / 1e6:.0f} million weights in float32, {trained / 1e6:.0f} million of them trained"
    )
    found = {
        of_target: 2 * weights,
        of_drafter: 4 * drafted,
        "a checkpoint: the drafter and two states of Adam": 4 * drafted + 8 * trained,
        "on the GPU in training: target, drafter, gradients and Adam": 2 * weights + 4 * drafted + 12 * trained,
        f"and for each row of {rates.max_length:,} tokens that is read at a time": row,
        f"answers, {tokens / 1e6:.0f} million tokens of 4 letters": 4 * tokens,
        "`--cache_features`, which the page leaves out": 2 * QWEN3_8B["hidden_size"] * tokens,
    }
    return [{"name": name, "gigabytes": num_bytes / 1e9} for name, num_bytes in found.items()]


def flops_per_token(target: PreTrainedModel, drafter: PreTrainedModel, rates: Rates) -> float:
    """Of training, attention's products left out: the target's layers forward, its head for both, and the drafter there and back."""
    head = QWEN3_8B["hidden_size"] * QWEN3_8B["vocab_size"]
    layers = num_weights(target) - 2 * head
    counted = rates.answer_tokens_per_row / rates.tokens_per_row
    return 2 * layers + counted * 3 * 2 * head + 6 * num_weights(drafter, is_trained=True)


def hours(target: PreTrainedModel, drafter: PreTrainedModel, rates: Rates) -> Rows:
    """Tokens, rate, hours and dollars of each step."""
    key_value_bytes = 2 * 2 * QWEN3_8B["num_hidden_layers"] * QWEN3_8B["num_key_value_heads"] * QWEN3_8B["head_dim"]
    read = 2 * num_weights(target) + rates.concurrency * rates.context * key_value_bytes
    seconds = flops_per_token(target, drafter, rates) / (rates.peak_flops * rates.flops_share)
    seconds += 1 / rates.overhead_tokens_per_second
    steps = {
        "answers, by vLLM": (
            rates.num_rows * rates.answer_tokens_per_row,
            rates.concurrency * rates.bandwidth * rates.bandwidth_share / read,
        ),
        f"training, {rates.num_epochs} epochs": (
            rates.num_rows * rates.tokens_per_row * rates.num_epochs,
            1 / seconds,
        ),
        "looking: doctor, trees, calibration, parity, benchmark": (
            rates.measured_tokens,
            rates.plain_tokens_per_second,
        ),
    }
    rows: Rows = []
    for name, (tokens, rate) in steps.items():
        rows.append({"name": name, "tokens": tokens, "rate": rate, "hours": tokens / rate / 3600})
    rows.append({"name": "together", "hours": total(rows, "hours")})

    for row in rows:
        row["dollars"] = row["hours"] * rates.dollars_per_hour
    return rows


def break_even(target: PreTrainedModel, drafter: PreTrainedModel) -> float:
    """Tokens a step at which drafting costs what it brings, if bytes were all: those of a draft over those of the target, and one."""
    head = QWEN3_8B["hidden_size"] * QWEN3_8B["vocab_size"]
    return 1 + (num_weights(drafter, is_trained=True) + head) / (num_weights(target) - head)


def started(repeats: int) -> Rows:
    """The seconds of each start, the middle of several."""
    rows = []
    for name, arguments in STARTS.items():
        is_command = arguments[0] == "-m"
        command = [sys.executable, *(["-c", START, *arguments[2:]] if is_command else arguments)]
        runs = [_timed(command) for _ in range(repeats)]

        row: dict[str, Any] = {"name": name, "runs": runs}
        for key in runs[0]:
            row[key] = statistics.median(run[key] for run in runs)
        rows.append(row)

    return rows


def _timed(command: list[str]) -> dict[str, float]:
    before, start = times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start, times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_seconds": cpu}


def walked(folder: Path) -> Iterator[dict[str, Any]]:
    """The seconds of each cell of the notebook that has a command of this package, one after the other."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    with walk.stage(folder, target, tokenizer) as stage:
        for cell in map(without_switch, walk.cells()[1:-1]):
            run = stage.run(cell)
            if commands := re.findall(r"^falcon-spec (\w+)", cell, flags=re.MULTILINE):
                switch = re.search(r"--(show_masks|dry_run)", cell)
                name = " ".join(["falcon-spec", commands[0], *([switch[0]] if switch else [])])
                times_run = f", {len(commands)} times" if len(commands) > 1 else ""
                yield {"name": name + times_run, "seconds": run.seconds, "cpu_seconds": run.cpu_seconds}


def without_switch(cell: str) -> str:
    """A cell for the embedded target, whose chat template knows no thinking."""
    for pattern in WITHOUT_SWITCH:
        cell = re.sub(pattern, "", cell)
    return cell


def main() -> None:
    """Compute, time, and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of each start")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "walk.json")
    args = parser.parse_args()
    rates, models = Rates(), meta_models()
    result = {
        "provenance": provenance(seed=0, **{name: str(value) for name, value in vars(args).items()}),
        "rates": asdict(rates),
    }
    result |= {"sizes": sizes(*models, rates), "hours": hours(*models, rates), "break_even": break_even(*models)}

    with tempfile.TemporaryDirectory() as folder:
        result["rows"] = []
        for row in chain(started(args.repeats), walked(Path(folder))):
            result["rows"].append(row)
            print(f"{row['name']}: {row['seconds']:.1f} s, {row['cpu_seconds']:.1f} s of processors", flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # a break leaves what it has


def tables(result: Result, path: str) -> list[str]:
    """Sizes and hours as computed, and the timed commands."""
    rates: dict[str, Any] = result["rates"]
    lead = (
        f"*Computed*, not measured: {rates['num_rows']:,} conversations of {rates['tokens_per_row']:,} tokens, {rates['answer_tokens_per_row']} of them answers; an H100 that trains at "
        f"{rates['flops_share']:.0%} of its {rates['peak_flops'] / 1e12:.0f} TFLOPS and decodes at {rates['bandwidth_share']:.0%} of its {rates['bandwidth'] / 1e12:.2f} TB/s, "
        f"{rates['dollars_per_hour']:.0f} dollars an hour. Training also pays what is left when arithmetic is nothing: {rates['overhead_tokens_per_second']:,.0f} tokens a second, as a small pair was "
        f"trained on an H100. Judging rates by their sources, the sum may be off by half. `benchmarks/walk.py` has each rate and its source."
    )
    time_columns = {
        "step": "{name}",
        "tokens": "{tokens:,.0f}",
        "tokens a second": "{rate:,.0f}",
        "hours": "{hours:.1f}",
        "dollars": "{dollars:.0f}",
    }
    even = f"A draft reads so much beside a step of the target that drafting pays from about {result['break_even']:.2f} tokens a step on, if reading weights were all that takes time (*computed*)."
    walked_lead = "*Measured*: the same commands at small sizes, with the embedded target under the name of Qwen3-8B; each starts anew. Seconds of the clock, which other work on the machine lengthens, and of processors."
    seconds = {"command": "{name}", "seconds": "{seconds:.1f}", "of processors": "{cpu_seconds:.1f}"}
    gigabytes = table({"what": "{name}", "GB": "{gigabytes:.1f}"}, result["sizes"])

    return [
        lead,
        table(time_columns, result["hours"]),
        gigabytes,
        even,
        walked_lead,
        table(seconds, result["rows"]),
        source_line(result, path),
    ]


REPORT = Report("examples/qwen3_8b.md", ["walk.json"], tables)


if __name__ == "__main__":
    main()
