"""The benchmark of batches goes on where it was stopped, and its texts are those of the target alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import batches

pytestmark = pytest.mark.usefixtures("machine_clock")


@pytest.mark.slow  # a model is loaded twice, and writes
def test_a_run_that_was_stopped_goes_on_with_the_batches_that_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--sizes", "2", "--limit", "2", "--max_new_tokens", "4", "--output", str(tmp_path / "batches.json")]
    calls, written = [], batches.written

    def stopping(*given: Any) -> batches.Run:
        calls.append(given[2])
        if len(calls) == 5:  # in the second batch
            raise KeyboardInterrupt
        return written(*given)

    monkeypatch.setattr(batches, "written", stopping)
    with pytest.raises(KeyboardInterrupt):
        batches.main(args)
    assert len((tmp_path / "batches.jsonl").read_text("utf-8").splitlines()) == 2  # settings, and the first batch

    batches.main(args)

    assert len(calls) == 5 + 6  # of three batches two were missing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batches.json"]
    [row] = json.loads((tmp_path / "batches.json").read_text("utf-8"))["rows"]
    assert row["tuned"]["num_rows"] == row["tuned"]["num_identical"] == 6
