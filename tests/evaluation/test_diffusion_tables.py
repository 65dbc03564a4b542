"""DiffuSpec's figures as a page shows them."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformers_falcon_spec.evaluation.report import BEGIN, END, render_into
from transformers_falcon_spec.provenance import provenance


@pytest.fixture
def render(tmp_path: Path) -> Any:
    """The page of DiffuSpec with one results file."""

    def rendered(name: str, settings: dict[str, Any], **result: Any) -> str:
        origin = provenance(seed=0, **settings)
        (tmp_path / name).write_text(json.dumps({"provenance": origin, **result}), encoding="utf-8")
        page = tmp_path / "diffuspec.md"
        page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
        render_into(page, tmp_path)
        return page.read_text(encoding="utf-8")

    return rendered


def test_the_ablation_stands_by_set_and_by_factor_beside_the_papers(render: Any) -> None:
    def row(drafter: str, factor: str, value: str, set_name: str, length: float, **more: Any) -> dict[str, Any]:
        place = {"drafter": drafter, "factor": factor, "value": value, "set": set_name}
        return {
            **place,
            "acceptance_length": length,
            "acceptance_length_interval": [2.0, 3.0],
            "drafted_per_step": 7.25,
            **more,
        }

    less = {"difference": -0.25, "difference_interval": [-0.5, 0.125]}
    rows = [
        row("prefix", "method", "CPS", "gsm8k", 2.75),
        row("prefix", "method", "CPS", "all", 2.5),
        row("full", "method", "CPS", "all", 2.625),
        row("prefix", "method", "CPS", "humaneval", 2.25),
        row("prefix", "fixed length k", "4", "all", 2.25, **less),
    ]
    drafters = {
        "prefix": {"attention": "prefix_causal", "block_size": 8},
        "full": {"attention": "full", "block_size": 4},
    }

    text = render("diffuspec_ablation.json", {"max_new_tokens": "96"}, num_texts=30, drafters=drafters, rows=rows)

    assert (
        "30 texts of the target, greedy, at most 96 tokens. `prefix` attends `prefix_causal` and drafts 8 tokens;"
        in text
    )
    assert "| drafter | drafts | GSM8K | HumanEval | all | paper |" in text
    assert "| prefix | CPS | 2.75 (2.00 to 3.00) | 2.25 (2.00 to 3.00) | 2.50 (2.00 to 3.00) | 6.95, 2.98x |" in text
    assert "| full | CPS | - | - | 2.62 (2.00 to 3.00) | 6.95, 2.98x |" in text
    assert "| factor | value | prefix | beside CPS | drafted | full | beside CPS | drafted | paper |" in text
    assert "| fixed length k | 4 | 2.25 | -0.25 (-0.50 to +0.12) | 7.2 | - | - | - | - |" in text
    assert "| fixed length k | 20 | - | - | - | - | - | - | 6.56, 2.98x |" in text  # what only the paper has
    assert "passes S" not in text  # nor was it measured here
    assert "Source: `benchmarks/results/diffuspec_ablation.json`" in text


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("diffuspec_speed.json", "None", "the reference target"),
        ("diffuspec_speed_0.3b.json", "0.3b", "the target inflated to `0.3b`"),
    ],
)
def test_arms_stand_by_speed_and_a_round_by_its_phases(render: Any, name: str, shape: str, words: str) -> None:
    phases = {"draft_seconds": 0.004, "search_seconds": 0.00025, "verify_seconds": 0.008, "other_seconds": 0.001}
    common = {"decoding": "greedy", "num_prompts": 15, "acceptance_length": 2.5}
    rows = [
        {**common, **phases, "arm": arm, "tokens_per_second": speed, "search_share": share, "beside_target": beside}
        for arm, speed, share, beside in (
            ("prefix: CPS", 80.44, 0.0189, {"ratio": 0.9, "interval": [0.8, 1.0]}),
            ("falcon", 120.0, 0.0, {"ratio": 1.25, "interval": [1.0, 1.5]}),
        )
    ]
    rows[1]["search_seconds"] = 0.0
    by_set = [
        {"decoding": "greedy", "set": "gsm8k", "arm": row["arm"], "speedup": 1.5, "speedup_interval": [1.25, 1.75]}
        for row in rows
    ]
    settings = {"shape": shape, "dtype": "float32", "max_new_tokens": "96"}

    text = render(name, settings, side_by_side=rows, rows=by_set)

    assert f"### Speed beside {words}, float32, " in text
    assert "| arm | tokens/s | acceptance length | all sets | GSM8K |" in text
    fast = "| falcon | 120.0 | 2.50 | 1.25x (1.00 to 1.50) | 1.50x (1.25 to 1.75) |"
    assert f"{fast}\n| prefix: CPS | 80.4 | 2.50 | 0.90x (0.80 to 1.00) | 1.50x (1.25 to 1.75) |" in text
    assert "| prefix: CPS | 4.00 | 0.25 | 8.00 | 1.00 | 1.9 % |" in text
    assert "| falcon | 4.00 | 0.00 | 8.00 | 1.00 | - |" in text
    assert f"Source: `benchmarks/results/{name}`" in text


def test_the_cache_stands_by_the_length_of_the_text(render: Any) -> None:
    beside = {"ratio": 4.0, "interval": [3.5, 4.5]}
    row = {"context": 896, "kept_seconds": 0.004, "anew_seconds": 0.016, "beside": beside}

    text = render("diffuspec_cache.json", {"num_new": "3", "repeats": "60"}, num_places=8, rows=[row])

    assert "over 8 places after a text of so many tokens, of which 3 are new since the last one" in text
    assert "| 896 | 16.00 | 4.00 | 4.00x (3.50 to 4.50) |" in text
    assert "Source: `benchmarks/results/diffuspec_cache.json`" in text
