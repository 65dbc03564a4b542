"""The race: who takes part and how, who is held against whom, and the tables."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inflation import Shape
from benchmarks.race import POOLED, REPORT, entries_of, inflated, standings
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.commands.methods import MethodEntry
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import provenance

SECONDS = {  # of a prompt of 10 tokens of each set
    "target": {"gsm8k": 10.0, "mt_bench": 10.0},
    "falcon": {"gsm8k": 5.0, "mt_bench": 4.0},
    "falcon5": {"gsm8k": 2.0, "mt_bench": 4.0},
    "eagle": {"gsm8k": 4.0, "mt_bench": 8.0},
    "lookup": {"gsm8k": 9.0, "mt_bench": 2.0},
}


def _runs() -> list[dict[str, Any]]:
    shared = {"decoding": "greedy", "num_tokens": 10, "prompt": "0"}
    return [
        {**shared, "method": method, "set": name, "seconds": seconds}
        for method, sets in SECONDS.items()
        for name, seconds in sets.items()
    ]


def test_the_fastest_rival_is_found_on_all_prompts_together_and_on_each_set() -> None:
    rows = standings(_runs(), ["falcon", "falcon5"])

    found = {(row["set"], row["method"], row["other"]): row["ratio"] for row in rows}
    assert found == pytest.approx(
        {
            (POOLED, "falcon", "lookup"): 11 / 9,
            (POOLED, "falcon5", "lookup"): 11 / 6,
            (POOLED, "falcon5", "falcon"): 9 / 6,
            ("gsm8k", "falcon", "eagle"): 4 / 5,
            ("gsm8k", "falcon5", "eagle"): 2.0,
            ("gsm8k", "falcon5", "falcon"): 2.5,
            ("mt_bench", "falcon", "lookup"): 0.5,
            ("mt_bench", "falcon5", "lookup"): 0.5,
            ("mt_bench", "falcon5", "falcon"): 1.0,
        }
    )


def test_drafters_of_every_kind_take_part_at_the_large_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    target = make_target(num_hidden_layers=4)
    make_drafter(target).save_pretrained(tmp_path / "falcon")
    peaked_dflash(target).save_pretrained(tmp_path / "dflash")
    make_target(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    shape = Shape.of(target.config).widened(hidden_size=256, num_hidden_layers=5, vocab_size=400)

    entries = {entry.name: entry for entry in entries_of(tmp_path)}
    found = {
        name: inflated(entries[name], target, shape, torch.float32)
        for name in ("falcon", "dflash", "dflash-tree", "small")
    }

    names = ["dflash", "falcon", "small"]
    assert [*entries] == ["falcon-reference", *names, "dflash-tree", "lookahead", "prompt-lookup"]
    kinds = {name: (method.kind, method.assistant.config.hidden_size) for name, method in found.items()}
    assert kinds == {
        "falcon": ("drafter", 256),
        "dflash": ("stock block diffusion", 256),
        "dflash-tree": ("drafter", 256),
        "small": ("stock assistant", 256),
    }
    lookup = inflated(MethodEntry.parse("prompt-lookup"), target, shape, torch.float32)
    assert lookup.kind == "stock prompt lookup"


def test_a_folder_without_drafters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"`--trained` must hold folders of drafters, but .* holds none"):
        entries_of(tmp_path)


def test_the_tables_show_speed_and_standings() -> None:
    rows = [
        {
            "decoding": "greedy",
            "method": method,
            "set": name,
            "speedup": 10.0 / seconds,
            "speedup_interval": [1.0, 4.0],
            "acceptance_length_pooled": 3.25,
        }
        for method, sets in SECONDS.items()
        if method != "target"
        for name, seconds in sets.items()
    ]
    origin = provenance(seed=0, shape="0.3b", dtype="bfloat16", limit=25, max_new_tokens=64)
    result = {"provenance": origin, "rows": rows, "standings": standings(_runs(), ["falcon", "falcon5"])}

    text = REPORT.render(result, "race.json")

    assert "| falcon5 | 5.00x (1.00 to 4.00), 3.25 tokens | 2.50x (1.00 to 4.00), 3.25 tokens |" in text
    assert "| greedy | all sets | falcon5 | falcon | 1.50 (" in text
    assert "| greedy | MT-Bench | falcon | lookup | 0.50 (0.50 to 0.50) |" in text
