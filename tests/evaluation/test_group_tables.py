"""EasySpec's figures as a page shows them."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformers_falcon_spec.evaluation.report import BEGIN, END, render_into
from transformers_falcon_spec.provenance import provenance


@pytest.fixture
def render(tmp_path: Path) -> Any:
    """The page of EasySpec with one results file."""

    def rendered(name: str, settings: dict[str, Any], **result: Any) -> str:
        origin = provenance(seed=0, **settings)
        (tmp_path / name).write_text(json.dumps({"provenance": origin, **result}), encoding="utf-8")
        page = tmp_path / "easyspec.md"
        page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
        render_into(page, tmp_path)
        return page.read_text(encoding="utf-8")

    return rendered


def test_lengths_stand_by_group_size_and_differences_below_them(render: Any) -> None:
    lengths = {"acceptance_length": 2.5, "acceptance_length_interval": [2.25, 3.0]}
    own = {"kind": "chain", "variant": "attention at once", **lengths}
    less = {"difference": -0.5, "difference_interval": [-0.75, 0.25]}
    rows = [
        {**own, "group_size": 1},
        {**own, "group_size": 4, **less},
        {**own, **less, "variant": "whole layers at once", "group_size": 4},
    ]
    groups = {"1": [[0], [1], [2], [3], [4]], "4": [[0], [1, 2, 3], [4]]}

    text = render(
        "easyspec_acceptance.json", {"depth": "5", "num_tree_nodes": "16"}, num_texts=40, groups=groups, rows=rows
    )

    assert "40 held-out texts" in text
    assert "Layers by groups of 1: 0 1 2 3 4; of 4: 0 1-3 4." in text
    assert "| drafts | variant | groups of 1 | groups of 4 |" in text
    assert "| chain | attention at once | 2.50 (2.25 to 3.00) | 2.50 (2.25 to 3.00) |" in text
    assert "| chain | whole layers at once | - | 2.50 (2.25 to 3.00) |" in text
    assert "| drafts | variant | groups of 4 |" in text
    assert "| chain | attention at once | -0.50 (-0.75 to +0.25) |" in text
    assert "| chain | whole layers at once | -0.50 (-0.75 to +0.25) |" in text
    assert "Source: `benchmarks/results/easyspec_acceptance.json`" in text


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("easyspec_speed.json", "None", "the reference target"),
        ("easyspec_speed_0.3b.json", "0.3b", "the target inflated to `0.3b`"),
    ],
)
def test_passes_come_first_then_arms_beside_others(render: Any, name: str, shape: str, words: str) -> None:
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
        {"decoding": "greedy", "arm": arm, **counts, "draft_seconds_per_pass": a_pass, "beside": beside}
        for arm, a_pass, beside in (
            ("stock", None, {"the target alone": ratio}),
            ("chain, groups of 1", 0.004, {"the target alone": ratio, "stock": ratio}),
        )
    ]
    settings = {"shape": shape, "dtype": "float32"}

    text = render(name, settings, context=256, passes=passes, side_by_side=rows)

    assert f"### Speed beside {words}, float32, " in text
    assert "| 4 | 2 | 6 | 4.00 | 5.00 | 4.50 | 1.25x (1.00 to 1.50) | 0.90x (1.00 to 1.50) |" in text
    assert "Interleaved runs, greedy, 15 prompts" in text
    assert (
        "| arm | tokens/s | acceptance length | drafting, ms a step | ms a pass | the target alone | stock |" in text
    )
    assert "| stock | 80.4 | 2.50 | 20.1 | - | 1.25x (1.00 to 1.50) | - |" in text
    assert "| chain, groups of 1 | 80.4 | 2.50 | 20.1 | 4.0 | 1.25x (1.00 to 1.50) | 1.25x (1.00 to 1.50) |" in text
    assert f"Source: `benchmarks/results/{name}`" in text
