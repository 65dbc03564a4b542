"""What the benchmarks of EasySpec work out from counts and seconds, and that they run from begin to end and go on where they stopped."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import easyspec_speed
from benchmarks.easyspec_speed import TimedPass, rivals, side_by_side, time_passes, times_as_fast
from lab.layer_groups import LayerByLayer
from tests.chat import save_target
from tests.drafters.easyspec.kinds import make_drafter, make_model
from tests.tiny import make_prompt
from transformers_falcon_spec.drafters.easyspec import LayeredModel
from transformers_falcon_spec.provenance import provenance


def test_ratios_of_passes_are_taken_turn_by_turn() -> None:
    turns = [{"slow": slow, "fast": 1.0} for slow in (2.0, 3.0, 100.0)]  # something else ran in the last one

    found = times_as_fast(turns, "fast", "slow")

    assert found == {"ratio": 3.0, "interval": (2.0, 100.0)}


def run(method: str, seconds: float, **stats: Any) -> dict[str, Any]:
    counts = {"num_steps": 5, "num_accepted": 5, "acceptance_histogram": {"1": 5}, "draft_seconds": 2.0, **stats}
    where = {"decoding": "greedy", "set": "sums", "prompt": "a", "num_tokens": 10}
    return {**where, "method": method, "seconds": seconds, "speculation": None if method == "target" else counts}


def test_every_method_stands_beside_its_rivals() -> None:
    names = {"target": 8.0, "stock": 16.0, "chain, groups of 1": 4.0, "chain, groups of 2, sequential": 2.0}
    records = [run(method, seconds) for method, seconds in names.items()]
    records.append(run("chain, groups of 2, fused", 1.0, num_passes=20))

    rows = {row["method"]: row for row in side_by_side(records)}

    beside = {method: {what: found["ratio"] for what, found in row["beside"].items()} for method, row in rows.items()}
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


def test_every_backend_and_stock_generation_write_the_same(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--repeats", "3", "--context", "10", "--threads", str(torch.get_num_threads()), "--group_sizes", "2")

    result = call(monkeypatch, easyspec_speed, models, tmp_path / "speed.json", *options)

    methods = [row["method"] for row in result["side_by_side"]]
    kinds = [f"{kind}, groups of {how}" for kind in ("chain", "tree") for how in ("1", "2, sequential", "2, fused")]
    assert sorted(methods) == sorted(
        ["stock", "stock, chain", *kinds, "tuned, groups of 1", "tuned, groups of 2, fused"]
    )
    assert all(row["num_identical"] == row["num_compared"] == 2 for row in result["rows"])
    lengths = {row["method"]: row["acceptance_length"] for row in result["side_by_side"]}
    for kind in ("chain", "tree"):
        assert lengths[f"{kind}, groups of 2, fused"] == lengths[f"{kind}, groups of 2, sequential"]
    assert [(row["width"], row["group_size"], row["num_groups"]) for row in result["passes"]] == [(1, 2, 4), (4, 2, 4)]
    assert result["context"] == 10


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("easyspec_speed.json", "None", "the reference target"),
        ("easyspec_speed_0.3b.json", "0.3b", "the target inflated to `0.3b`"),
    ],
)
def test_passes_come_first_then_methods_beside_others(name: str, shape: str, words: str) -> None:
    ratio = {"ratio": 1.25, "interval": [1.0, 1.5]}
    seconds = {"alone_seconds": 0.004, "sequential_seconds": 0.005, "fused_seconds": 0.0045}
    both = {"beside_sequential": ratio, "beside_alone": {**ratio, "ratio": 0.9}}
    passes = [{"width": 4, "group_size": 2, "num_groups": 6, **seconds, **both}]
    counts = {
        "num_prompts": 15,
        "tokens_per_second": 80.44,
        "acceptance_length": 2.5,
        "draft_seconds_per_step": 0.0201,
    }
    rows = [
        {"decoding": "greedy", "method": method, **counts, "draft_seconds_per_pass": a_pass, "beside": beside}
        for method, a_pass, beside in (
            ("stock", None, {"the target alone": ratio}),
            ("chain, groups of 1", 0.004, {"the target alone": ratio, "stock": ratio}),
        )
    ]
    settings = {"shape": shape, "dtype": "float32"}

    text = easyspec_speed.REPORT.render(
        {"provenance": provenance(seed=0, **settings), "context": 256, "passes": passes, "side_by_side": rows}, name
    )

    assert f"### Speed beside {words}, float32, " in text
    assert "| 4 | 2 | 6 | 4.00 | 5.00 | 4.50 | 1.25x (1.00 to 1.50) | 0.90x (1.00 to 1.50) |" in text
    assert "Interleaved runs, greedy, 15 prompts" in text
    assert "| method | acceptance length | drafting, ms a step | the target alone | stock |" in text
    assert "| stock | 2.50 | 20.1 | 1.25x (1.00 to 1.50) | - |" in text
    assert "| chain, groups of 1 | 2.50 | 20.1 | 1.25x (1.00 to 1.50) | 1.25x (1.00 to 1.50) |" in text
    assert f"Source: `benchmarks/results/{name}`" in text


class Clock:
    """A clock that advances by one whenever it is read, and by what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_passes_of_all_backends_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, clock = make_drafter(make_model("llama")), Clock()
    monkeypatch.setattr(easyspec_speed, "_now", clock)
    attend, in_order = LayeredModel.attend, LayerByLayer(drafter.layered, drafter.config.layer_groups)
    backends = {"in order": in_order, "at once": drafter.backend()}

    def slow(*args: Any) -> Any:
        clock.now += 9
        return attend(*args)

    monkeypatch.setattr(LayeredModel, "attend", slow)
    passes = {
        name: TimedPass(drafter, make_prompt(6), 3, backend, is_exact=False) for name, backend in backends.items()
    }
    turns = time_passes(passes, repeats=2)

    # of 7 layers 5 stand in groups; the fused backend asks none of them
    assert turns == [{"in order": 1 + 5 * 9, "at once": 1}] * 2
