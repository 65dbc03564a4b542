"""What this repository shows of results that commands wrote: `falcon-spec bench`, `parity` and `lab.calibration`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.report import calibration, speed

from . import Report, Result, machine, source_line, sources_line, speed_by_set, table

ROOT = Path(__file__).parents[2]
SMOLLM2_RECORD = ROOT / "models" / "falcon-smollm2-135m" / "training.json"

PARITY_COLUMNS = {
    "texts": "{what}",
    "type": "{dtype}",
    "decoding": "{decoding}",
    "tokens a step": "{tokens_per_step:.2f}",
    "identical": "{identical} of {num_prompts}",
    "proven ties": "{tie}",
    "different": "{bug}",
}
PARITY = {
    "parity.json": "test prompts",
    "parity_greedy.json": "more prompts",
    "parity_sampling.json": "ways of sampling",
    "parity_bfloat16.json": "test prompts",
    "parity_float16.json": "test prompts",
    "parity_static.json": "fixed shapes, tuned",
    "parity_bfloat16_static.json": "fixed shapes",
    "parity_hybrid.json": "a hybrid target",
    "parity_smollm2.json": "SmolLM2, tuned",
    "parity_smollm2_bfloat16.json": "SmolLM2",
}


def speed_tables(result: Result, path: str) -> list[str]:
    """The tables of `falcon-spec bench`."""
    return [speed(result, path)]


def compared_tables(result: Result, path: str) -> list[str]:
    """Many methods of `falcon-spec bench`, in short: the results file has the rest."""
    return [
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids: times as fast as the target alone (95 % "
        "interval), and tokens a step.",
        *speed_by_set(result),
        source_line(result, path),
    ]


def curve_tables(result: Result, path: str) -> list[str]:
    """The tables of drafters that are named after the readings they had, fewest first."""
    rows = sorted(result["rows"], key=lambda row: int("".join(filter(str.isdigit, row["method"])) or 0))
    return [_training(SMOLLM2_RECORD), *compared_tables({**result, "rows": rows}, path)]


def _training(path: Path) -> str:
    """What the training took that a record describes, in words."""
    record = json.loads(path.read_text(encoding="utf-8"))
    steps = record["curve"][-1]["step"]
    losses = [row["loss"] for row in record["curve"] if "loss" in row]
    evaluated = next(row for row in reversed(record["curve"]) if "eval_loss" in row)
    since = " since it last went on" if "--resume_from_checkpoint" in record["command"] else ""
    return (
        f"{record['num_examples']:,} conversations, {steps:,} steps, {record['train_seconds'] / 60:.0f} minutes{since}, {record['num_trained'] / 1e6:.1f}M weights "
        f"trained; loss {losses[0]:.1f} at first, {losses[-1]:.2f} in the end, {evaluated['eval_loss']:.2f} on held-out text, where a step writes "
        f"{evaluated['eval_acceptance_length']:.2f} tokens. Source: `{path.relative_to(ROOT)}`; {record['date'][:10]}, {machine(record)}, "
        f"{record['threads']} threads, seed {record['seed']}, torch {record['versions']['torch']}, transformers {record['versions']['transformers']}."
    )


@dataclass(frozen=True)
class ParityReport(Report):
    """One table of all results files of `falcon-spec parity`."""

    def render_all(self, results: Mapping[str, Result]) -> list[str]:
        """A row for each file and way of decoding, then the sources."""
        rows = []
        for file, result in results.items():
            origin = result["provenance"]
            what = {"what": PARITY[file], "dtype": origin["dtype"]}
            rows += [{**what, **row} for row in result["rows"]]

        if not rows:
            return []
        return [table(PARITY_COLUMNS, rows), sources_line(results)]


def parity_tables(result: Result, path: str) -> list[str]:
    """The table of one results file of `falcon-spec parity`."""
    return [table(PARITY_COLUMNS, result["rows"]), source_line(result, path)]


def calibration_tables(result: Result, path: str) -> list[str]:
    """The tables of `lab.calibration`."""
    return [calibration(result, path)]


REPORTS = (
    Report("examples/smollm2.md", ["smollm2_curve.json"], curve_tables),
    Report("docs/results.md#smollm2", ["speed_smollm2.json"], speed_tables),
    Report("docs/results.md#speed", ["speed.json"], speed_tables),
    Report("docs/results.md#hybrid", ["hybrid.json", "hybrid_untrained.json"], compared_tables),
    ParityReport("docs/results.md#parity", [*PARITY], parity_tables),
    Report("docs/results.md#calibration", ["calibration.json"], calibration_tables),
    Report("docs/results.md#diffuspec", ["diffuspec_rivals.json"], compared_tables, order=1),
)
