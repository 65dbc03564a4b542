"""Results of every kind are read, and other files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.results import kind_of, read_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def written(path: Path, result: Any) -> Path:
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


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


def test_a_file_of_bench_in_which_no_method_finished_is_one_of_bench(tmp_path: Path) -> None:
    result = {"provenance": {}, "methods": [{"method": "falcon", "failure": {"text": "killed"}}], "rows": []}

    assert read_result(written(tmp_path / "speed.json", result)) == result
    with pytest.raises(OptionError, match="must be a results file of `falcon-spec parity`"):
        read_result(tmp_path / "speed.json", ["parity"])
