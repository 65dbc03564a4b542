"""Costs of trees are ratios of what was measured in the same rounds, on a cache that stays as it is."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tree_cost as script
from tests.chat import make_tokenizer
from tests.tiny import make_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.transformers_versions import CACHE

SIZES = {script.STOCK: 64, script.PACKED: 128}  # nodes that cost one plain step


def test_each_round_reads_every_size_after_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_target()
    seen: list[tuple[int, int]] = []  # tokens read, and slots before them
    forward = type(model).forward

    def recorded(self: object, input_ids: torch.Tensor, **kwargs: object) -> object:
        seen.append((input_ids.shape[1], kwargs[CACHE].get_seq_length()))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", recorded)
    reads: list[int] = []
    read = Target.read
    monkeypatch.setattr(Target, "read", lambda self, ids, tree: reads.append(len(tree)) or read(self, ids, tree))

    rounds = script.rounds_of(model, context=9, repeats=2)

    assert len(rounds) == 2
    assert all(set(found) == set(script.READS) and min(found.values()) > 0 for found in rounds)
    steps = [step for step in seen if step[0] != 9]
    assert {slots for _, slots in steps} == {9}
    assert sorted(num for num, _ in steps) == sorted([1, *script.NODES, *script.NODES] * 5)
    assert sorted(reads) == sorted(script.NODES * 10)


def test_costs_are_ratios_of_medians_with_an_interval_over_rounds() -> None:
    rounds = [
        {(weights, num): plain * (1 + num / size) for weights, num in script.READS for size in [SIZES[weights]]}
        for plain in (1.0, 2.0, 3.0)
    ]

    stock, packed = script.summary_rows("small", make_target(), rounds)

    assert stock["plain_seconds"] == 2.0
    assert [cost["num_nodes"] for cost in stock["costs"]] == list(script.NODES)
    assert (stock["costs"][-1]["cost"], packed["costs"][-1]["cost"]) == (2.0, 1.5)
    assert stock["costs"][-1]["interval"] == (2.0, 2.0)  # a machine that slows down for a whole round changes nothing
    rounds[0][script.STOCK, 64] *= 2
    low, high = script.summary_rows("small", make_target(), rounds)[0]["costs"][-1]["interval"]
    assert low < high


def test_the_script_writes_what_the_report_renders(tmp_path: Path) -> None:
    folder, output = tmp_path / "small", tmp_path / "tree_cost.json"
    make_target().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)

    script.main(
        ["--target", str(folder), "--shapes", "small", "--context", "5", "--repeats", "3", "--output", str(output)]
    )

    result = json.loads(output.read_text("utf-8"))
    row = result["rows"][0]
    text = script.REPORT.render(result, "tree_cost.json")
    assert f" | {row['costs'][-1]['cost']:.2f} |" in text
    assert "float32, after 5 tokens" in text
    with pytest.raises(OptionError, match="must be at least 1, but they are 0, 5"):
        script.main(["--target", str(folder), "--context", "5", "--repeats", "0"])
