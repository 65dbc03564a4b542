"""Results of `falcon-spec bench` are read, and other files are refused."""

from pathlib import Path

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import read_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_results_of_bench_are_read() -> None:
    assert {"provenance", "methods", "rows"} <= read_result(RESULTS / "speed.json").keys()


def test_results_of_another_command_are_refused() -> None:
    with pytest.raises(OptionError, match="must be a results file of `falcon-spec bench`, but it is another kind"):
        read_result(RESULTS / "parity.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="but it is read with FileNotFoundError"):
        read_result(tmp_path / "absent.json")


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": [{}]}', '{"provenance": {}, "rows": [{"method": "x"}]}'])
def test_a_file_that_holds_no_benchmark_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "speed.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(OptionError, match=r"speed\.json` must be a results file of `falcon-spec bench`, but"):
        read_result(path)


def test_a_file_without_rows_is_one_of_bench(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text('{"provenance": {}, "methods": [], "rows": []}', encoding="utf-8")

    assert read_result(path)["rows"] == []
