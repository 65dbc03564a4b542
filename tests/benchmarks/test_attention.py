"""Every timed variant of attention computes the same, and reads the same keys."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention as script


@pytest.mark.parametrize("name", [name for name in script.VARIANTS if name != "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_nodes", [1, 6])
def test_variants_compute_what_stock_attention_computes(name: str, dtype: torch.dtype, num_nodes: int) -> None:
    torch.manual_seed(0)
    reads = script.reads_of((2, 4, 2, 16), num_nodes, 1024, 2, dtype, torch.device("cpu"))

    limits = (
        {} if dtype is torch.float32 else {"rtol": 0.016, "atol": 1e-3}
    )  # parts are rounded before they are merged
    for read in reads:
        torch.testing.assert_close(script.VARIANTS[name](read), script.stock(read), **limits)


def test_the_mask_hides_slots_behind_the_tree_and_other_branches() -> None:
    read = script.reads_of((1, 2, 1, 8), 3, 256, 1, torch.float32, torch.device("cpu"))[0]

    is_seen = read.mask[0, 0] == 0

    assert is_seen[:, :192].all()
    assert is_seen[:, 192:195].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert not is_seen[:, 195:].any()
    assert read.num_needed == 195


def test_the_command_times_every_variant_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attention.json"
    sizes = ["--sizes", "1", "4", "2", "8", "--slots", "512", "1024", "--nodes", "2", "--layers", "1"]

    script.main([*sizes, "--dtype", "float32", "--repeats", "2", "--output", str(output)])

    rows = json.loads(output.read_text())["rows"]
    assert [(row["slots"], row["variant"]) for row in rows] == [
        (slots, name) for slots in (512, 1024) for name in script.VARIANTS
    ]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 and row["floor_seconds"] > 0 for row in rows)
    assert rows[-1]["floor_seconds"] == pytest.approx(2 * rows[0]["floor_seconds"])
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
