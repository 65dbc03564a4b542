"""The README's few numbers come from results files."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.overview import PARITY, SPEED, overview
from transformers_falcon_spec.evaluation.methods import BASELINE
from transformers_falcon_spec.provenance import provenance

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def write_parity(path: Path, dtype: str, **counts: int) -> None:
    result = {"provenance": provenance(seed=0, dtype=dtype), "rows": [{"num_prompts": sum(counts.values()), **counts}]}
    path.write_text(json.dumps(result), encoding="utf-8")


@pytest.fixture
def speed() -> dict[str, Any]:
    return json.loads((RESULTS / "speed.json").read_text(encoding="utf-8"))


def test_a_machine_has_a_row_for_each_way_of_decoding_and_another_stands_below(
    tmp_path: Path, speed: dict[str, Any]
) -> None:
    speed["provenance"]["device"] = "CPU, 2 cores"
    (tmp_path / SPEED[0]).write_text(json.dumps(speed), encoding="utf-8")
    speed["provenance"] |= {"device": "GPU X", "dtype": {"target": "bfloat16"}}
    speed["rows"][0] |= {"speedup": 2.5, "speedup_interval": [2.25, 2.75], "acceptance_length_pooled": 3.5}
    (tmp_path / SPEED[1]).write_text(json.dumps(speed), encoding="utf-8")

    table = overview(tmp_path)[0].splitlines()

    assert table[0] == "| machine | prompts a set | decoding | GSM8K | HumanEval | MT-Bench |"
    assert [line.split(" | ")[0] for line in table[2:]] == ["| CPU, 2 cores, float32"] * 2 + ["| GPU X, bfloat16"] * 2
    assert table[4].startswith("| GPU X, bfloat16 | 25 | greedy | **2.50x** (2.25 to 2.75), 3.5 tokens |")


def test_of_a_race_our_drafter_has_the_rows_and_a_sentence_names_the_best_rival(
    tmp_path: Path, speed: dict[str, Any]
) -> None:
    ours = next(row for row in speed["rows"] if row["method"] != BASELINE)
    rivals = [{**ours, "method": name, "speedup": 9.0} for name in ("eagle1", "lookahead")]
    alone = {**ours, "method": BASELINE, "speedup": 1.0}
    standing = {
        "decoding": "greedy",
        "method": ours["method"],
        "other": "eagle1",
        "ratio": 1.25,
        "interval": [1.1, 1.4],
    }
    race = {**speed, "rows": [alone, ours, *rivals], "standings": [standing]}
    (tmp_path / "race.json").write_text(json.dumps(race), encoding="utf-8")

    table, sentence = overview(tmp_path)[:2]

    assert f"**{ours['speedup']:.2f}x**" in table
    assert "9.00x" not in table
    assert "1.00x" not in table
    assert sentence.startswith(
        "Beside the best of 2 rivals, all prompts together: greedy 1.25 (1.10 to 1.40) times as fast as eagle1 ("
    )


def test_equal_texts_are_counted_by_type_and_the_others_by_reason(tmp_path: Path) -> None:
    write_parity(tmp_path / PARITY[0], "float32", identical=200, tie=0, bug=0)
    write_parity(tmp_path / PARITY[1], "bfloat16", identical=26, tie=10, bug=0)

    sentence, sources = overview(tmp_path)

    assert "200 of 200 in float32, 26 of 36 in bfloat16." in sentence
    assert "10 go on differently after a proven tie of rounding, and 0 for another reason." in sentence
    assert f"`benchmarks/results/{PARITY[1]}` (commit `" in sources


def test_a_folder_without_results_gives_nothing(tmp_path: Path) -> None:
    assert overview(tmp_path) == []
