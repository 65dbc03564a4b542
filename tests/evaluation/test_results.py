"""Results of every kind are read, also under the keys of earlier versions, and other files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.records import Records
from transformers_falcon_spec.evaluation.results import kind_of, read_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def written(path: Path, result: Any) -> Path:
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def test_a_method_that_an_earlier_version_called_arm_is_read_and_measured_on(tmp_path: Path) -> None:
    now = json.loads((RESULTS / "speed.json").read_text(encoding="utf-8"))
    older = (RESULTS / "speed.json").read_text(encoding="utf-8").replace('"method":', '"arm":')
    (tmp_path / "speed.json").write_text(older, encoding="utf-8")
    (tmp_path / "runs.jsonl").write_text('{"settings": {}}\n{"key": "a", "arm": "falcon"}\n', encoding="utf-8")

    result, records = read_result(tmp_path / "speed.json"), Records(tmp_path / "runs.jsonl", {})

    assert json.loads(older)["rows"][0]["arm"] == now["rows"][0]["method"]
    assert result == now
    assert records.entries == [{"key": "a", "method": "falcon"}]


def test_a_bin_that_an_earlier_version_gave_a_chance_has_a_probability(tmp_path: Path) -> None:
    side = {"best_nodes": {"bins": [{"chance": 0.25, "share": 0.5}]}}
    older = {"provenance": {}, "fits_of_folds": [], "rows": [{"before": side}]}

    result = read_result(written(tmp_path / "calibration.json", older), ["calibrate"])

    assert result["rows"][0]["before"]["best_nodes"]["bins"] == [{"probability": 0.25, "share": 0.5}]


@pytest.mark.parametrize("kind", ["bench", "parity", "calibrate"])
def test_the_command_that_wrote_a_file_is_known(kind: Any, tmp_path: Path) -> None:
    names: dict[str, str] = {"bench": "speed.json", "parity": "parity.json", "calibrate": "calibration.json"}
    others = [name for name in names if name != kind]

    assert kind_of(read_result(RESULTS / names[kind], [kind])) == kind
    for other in others:
        with pytest.raises(OptionError, match=f"must be a results file of `falcon-spec {kind}`, but"):
            read_result(RESULTS / names[other], [kind])
    with pytest.raises(OptionError, match="but there is no such file"):
        read_result(tmp_path / "absent.json", [kind])


def test_a_row_of_an_earlier_version_gets_what_follows_from_its_counts(tmp_path: Path) -> None:
    row = {
        "arm": "falcon",
        "acceptance_length": 2.5,
        "acceptance_histogram": {"0": 1, "2": 3},
        "num_tokens": 10,
        "num_prompts": 2,
    }
    result = read_result(written(tmp_path / "old.json", {"provenance": {"trees": {"falcon": 8}}, "rows": [row]}))

    (found,), (method,) = result["rows"], result["methods"]
    assert (found["acceptance_length_pooled"], found["alpha"], found["num_runs"]) == (2.5, 0.6, 2)
    assert found["acceptance_length_per_request"] is None
    assert (method["method"], method["num_nodes"], method["failure"]) == ("falcon", 8, None)


def test_a_file_of_bench_in_which_no_method_finished_is_one_of_bench(tmp_path: Path) -> None:
    result = {"provenance": {}, "methods": [{"method": "falcon", "failure": {"text": "killed"}}], "rows": []}

    assert read_result(written(tmp_path / "speed.json", result)) == result
    with pytest.raises(OptionError, match="must be a results file of `falcon-spec parity`"):
        read_result(tmp_path / "speed.json", ["parity"])
