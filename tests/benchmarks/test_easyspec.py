"""What the benchmarks of EasySpec work out from counts and seconds, and that they run from begin to end and go on where they stopped."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import easyspec_acceptance, easyspec_speed
from benchmarks.easyspec_acceptance import arms_of, rows_of
from benchmarks.easyspec_speed import rivals, side_by_side, times_as_fast
from tests.chat import save_target
from transformers_falcon_spec.evaluation.group_fit import Steps


def steps(*accepted: int) -> list[Steps]:
    """Texts of two steps each that kept so many drafted tokens."""
    return [Steps(2, num, 4, 2) for num in accepted]


def test_layers_alone_leave_nothing_to_ablate() -> None:
    assert arms_of(["chain"], [1, 3]) == [
        ("chain", "attention at once", 1),
        ("chain", "attention at once", 3),
        ("chain", "without calibration", 3),
        ("chain", "whole layers at once", 3),
    ]


def test_groups_are_held_against_none_and_ablations_against_the_same_groups() -> None:
    counts = {
        ("tree", "attention at once", 1): steps(4, 8),
        ("tree", "attention at once", 2): steps(2, 8),
        ("tree", "whole layers at once", 2): steps(2, 4),
        ("chain", "attention at once", 2): steps(1, 1),  # nothing to hold it against
    }

    alone, groups, whole, chain = rows_of(counts)

    assert [row["acceptance_length"] for row in (alone, groups, whole, chain)] == [4.0, 3.5, 2.5, 1.5]
    assert alone["acceptance_length_interval"] == (3.0, 5.0)  # one text twice, or the other
    assert (groups["difference"], groups["difference_interval"]) == (-0.5, (-1.0, 0.0))
    assert (whole["difference"], whole["difference_interval"]) == (-1.0, (-2.0, 0.0))
    assert "difference" not in alone
    assert "difference" not in chain


def test_ratios_of_passes_are_taken_turn_by_turn() -> None:
    turns = [{"slow": slow, "fast": 1.0} for slow in (2.0, 3.0, 100.0)]  # something else ran in the last one

    found = times_as_fast(turns, "fast", "slow")

    assert found == {"ratio": 3.0, "interval": (2.0, 100.0)}


def run(arm: str, seconds: float, **stats: Any) -> dict[str, Any]:
    counts = {"num_steps": 5, "num_accepted": 5, "acceptance_histogram": {"1": 5}, "draft_seconds": 2.0, **stats}
    where = {"decoding": "greedy", "set": "sums", "prompt": "a", "repeat": 0, "num_tokens": 10}
    return {**where, "arm": arm, "seconds": seconds, "speculation": None if arm == "target" else counts}


def test_every_arm_stands_beside_its_rivals() -> None:
    names = {"target": 8.0, "stock": 16.0, "chain, groups of 1": 4.0, "chain, groups of 2, sequential": 2.0}
    records = [run(arm, seconds) for arm, seconds in names.items()]
    records.append(run("chain, groups of 2, fused", 1.0, num_passes=20))

    rows = {row["arm"]: row for row in side_by_side(records)}

    beside = {arm: {what: found["ratio"] for what, found in row["beside"].items()} for arm, row in rows.items()}
    assert beside == {
        "stock": {"the target alone": 0.5},
        "chain, groups of 1": {"the target alone": 2.0, "stock": 4.0},
        "chain, groups of 2, sequential": {"the target alone": 4.0, "stock": 8.0, "groups of 1": 2.0},
        "chain, groups of 2, fused": {"the target alone": 8.0, "stock": 16.0, "sequential": 2.0, "groups of 1": 4.0},
    }
    fused = rows["chain, groups of 2, fused"]
    assert (fused["tokens_per_second"], fused["acceptance_length"]) == (10.0, 2.0)
    assert (fused["draft_seconds_per_step"], fused["draft_seconds_per_pass"]) == (0.4, 0.1)
    assert rows["stock"]["draft_seconds_per_pass"] is None
    assert rivals("tree, groups of 4, fused")["sequential"] == "tree, groups of 4, sequential"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that drafts for itself, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_target(folder / "target", max_position_embeddings=128, num_hidden_layers=5)
    rows = [{"id": name, "prompt": f"{name} plus two"} for name in ("one", "five")]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def call(monkeypatch: pytest.MonkeyPatch, script: Any, models: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run a script; what it wrote."""
    given = ["--target", str(models / "target"), "--draft_model", str(models / "target")]
    given += ["--prompts", str(models / "sums.jsonl"), "--output", str(output), "--max_new_tokens", "8", *options]
    monkeypatch.setattr(sys, "argv", ["script", *given])
    script.main()
    return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_more_kinds_of_drafts_join_what_was_counted(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, few = tmp_path / "acceptance.json", ("--group_sizes", "1", "3", "--depth", "3")
    first = call(monkeypatch, easyspec_acceptance, models, output, "--kinds", "chain", *few)
    lines = output.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()

    both = call(monkeypatch, easyspec_acceptance, models, output, *few)

    again = output.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 + 4 * 2  # settings, texts, then each arm on each text
    assert again[: len(lines)] == lines
    assert len(again) == len(lines) + 4 * 2
    assert both["rows"][: len(first["rows"])] == first["rows"]
    assert both["groups"] == {"1": [[0], [1], [2], [3], [4]], "3": [[0], [1, 2, 3], [4]]}
    assert first["rows"][0]["acceptance_length"] > 2  # a model that drafts for itself, without groups
    assert all(row["acceptance_length"] <= first["rows"][0]["acceptance_length"] for row in first["rows"])
    ablated = [row["acceptance_length"] for row in first["rows"][1:]]
    assert len(set(ablated)) > 1  # they do differ


def test_every_backend_and_stock_generation_write_the_same(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--repeats", "3", "--context", "10", "--threads", str(torch.get_num_threads()), "--group_sizes", "2")

    result = call(monkeypatch, easyspec_speed, models, tmp_path / "speed.json", *options)

    arms = [row["arm"] for row in result["side_by_side"]]
    kinds = [f"{kind}, groups of {how}" for kind in ("chain", "tree") for how in ("1", "2, sequential", "2, fused")]
    assert sorted(arms) == sorted(["stock", "stock, chain", *kinds, "tuned, groups of 1", "tuned, groups of 2, fused"])
    assert all(row["num_identical"] == row["num_compared"] == 2 for row in result["rows"])
    lengths = {row["arm"]: row["acceptance_length"] for row in result["side_by_side"]}
    for kind in ("chain", "tree"):
        assert lengths[f"{kind}, groups of 2, fused"] == lengths[f"{kind}, groups of 2, sequential"]
    assert [(row["width"], row["group_size"], row["num_groups"]) for row in result["passes"]] == [(1, 2, 4), (4, 2, 4)]
    assert result["context"] == 10
