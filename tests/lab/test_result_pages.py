"""The page of a benchmark: whole, safe, readable without anything else, and showing the numbers of the JSON."""

import copy
import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lab.report import speed
from lab.result_pages import main, render_result
from tests.evaluation.opening import seen_in_a_browser
from tests.pages import Outline
from transformers_falcon_spec.provenance import provenance

ATTACK = "<script>alert('x')</script>&\"$\\frac|"
SETS = ("gsm8k", "my set")


def make_row(target: str, method: str, set_name: str, speedup: float, **changes: Any) -> dict[str, Any]:
    row = {
        "target": target,
        "method": method,
        "decoding": "greedy",
        "set": set_name,
        "num_runs": 4,
        "num_prompts": 4,
        "num_tokens": 400,
        "repetition_rate": 0.125,
        "acceptance_length_pooled": 1.5 + speedup,
        "acceptance_length_pooled_interval": (1.0, 4.0),
        "acceptance_length_per_request": 1.25 + speedup,
        "accepted_drafts_per_step": 0.5 + speedup,
        "tokens_per_forward": 2.0,
        "alpha": 0.625,
        "acceptance_by_depth": [0.75, 0.5, 0.0],
        "prefill_seconds": 0.0415,
        "draft_seconds_per_step": 0.0043,
        "verify_seconds_per_step": 0.0157,
        "other_seconds_per_step": 0.0012,
        "overhead_share": 0.055,
        "speedup": speedup,
        "speedup_interval": (speedup - 0.1, speedup + 0.2),
        "decode_speedup": speedup + 0.01,
        "tokens_per_second": 125.31,
        "plain_seconds_per_step": 0.0108,
        "gate": 1.33,
        "num_identical": 4,
        "num_compared": 4,
    }
    return {**row, **changes}


def make_method(target: str, method: str, **changes: Any) -> dict[str, Any]:
    entry = {
        "target": target,
        "method": method,
        "kind": "drafter",
        "weights": "w",
        "num_nodes": 8,
        "source": f"models/{method}",
    }
    return {
        **entry,
        "peak_bytes": 421 * 2**20,
        "peak_device_bytes": None,
        "weight_bytes": 0,
        **changes,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    shapes = {"falcon-8": (1.5, 8, "w"), "falcon-16": (1.75, 16, "w"), "lookup": (0.75, 11, None)}
    rows, methods = [], []
    for target in ("small", "big"):
        methods.append(make_method(target, "target", kind="target alone", weights=None, num_nodes=1))
        for method, (speedup, num_nodes, weights) in shapes.items():
            methods.append(make_method(target, method, num_nodes=num_nodes, weights=weights))
            rows += [make_row(target, method, set_name, speedup) for set_name in SETS]
    rows[0]["num_identical"] = 3
    origin = provenance(seed=0, dtype={"small": "float32", "big": "bfloat16"})
    return {"provenance": origin, "methods": methods, "rows": rows}


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def marks(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if f"-mark-{kind}-" in element.get("id", "")]


def length(mark: ElementTree.Element) -> float:
    """How far a bar or line reaches from left to right."""
    positions = [float(x) for path in mark.iter("path") for x in re.findall(r"[ML] (\S+) ", path.get("d", ""))]
    return max(positions) - min(positions)


def test_every_number_of_the_json_is_on_the_page(result: dict[str, Any]) -> None:
    text = re.sub(r"(?:<[^>]*>|\s)+", " ", html.unescape(render_result(result)))

    assert "3 methods against the target alone, 48 texts" in text
    assert "GSM8K falcon-8 1.50x 1.40 to 1.70x 1.51x 1.33x 3.00 2.75 2.00 62.5 % 125.31 12.5 % 3 of 4" in text
    assert "my set falcon-16 1.75x 1.65 to 1.95x 1.76x 1.33x 3.25 3.00 2.25 62.5 % 125.31 12.5 % 4 of 4" in text
    assert "GSM8K lookup 41.5 10.8 4.3 15.7 1.2 0.75 0.50 0.00" in text
    assert "falcon-16 drafter models/falcon-16 16 421.0 \u2013 0.0" in text
    assert "small float32, big bfloat16" in text
    assert result["provenance"]["commit"] in text


def test_what_changed_its_text_is_said(result: dict[str, Any]) -> None:
    page = Outline(render_result(result))

    text = re.sub(r"\s+", " ", page.text)
    assert "falcon-8 on small, greedy, gsm8k: 3 of 4 texts are identical" in text
    assert text.count("greedy text changed") == 1


def test_sampled_texts_may_differ(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        row["decoding"] = "temperature-0.7"

    assert "changed" not in Outline(render_result(result)).text


def test_every_plot_is_well_formed_and_draws_every_row(result: dict[str, Any]) -> None:
    svgs = drawings(render_result(result))

    assert len(svgs) == 2 * 3
    for start in (0, 3):
        speedups, depths, phases = svgs[start : start + 3]
        assert len(marks(speedups, "bar")) == len(marks(speedups, "interval")) == len(marks(depths, "line")) == 6
        assert [len(marks(phases, name)) for name in ("drafting", "verifying", "elsewhere")] == [6, 6, 6]


def test_bars_are_as_long_as_their_numbers(result: dict[str, Any]) -> None:
    speedups, _, phases, *_ = drawings(render_result(result))

    unit = length(marks(speedups, "bar")[0]) / 1.5
    expected = [1.5, 1.75, 0.75] * 2
    assert [length(mark) / unit for mark in marks(speedups, "bar")] == pytest.approx(expected, rel=1e-3)
    assert [length(mark) / unit for mark in marks(speedups, "interval")] == pytest.approx([0.3] * 6, rel=1e-2)
    drafting, verifying = (length(marks(phases, name)[0]) for name in ("drafting", "verifying"))
    assert verifying / drafting == pytest.approx(15.7 / 4.3, rel=1e-3)


def test_the_page_needs_nothing_else_and_names_what_it_shows(result: dict[str, Any]) -> None:
    source = render_result(result)
    page = Outline(source)

    assert re.search(r"https?:|//", source) is None
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "metadata"})
    references = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")
    ]
    assert all(value.startswith("#") for value in references)
    assert set(re.findall(r"url\((.)", source)) <= {"#"}
    assert "prefers-color-scheme: dark" in source
    assert not re.findall(r"#0[0-3]0[0-9a-f]{3}\b", source)  # no stand-in colour is left
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    names = ("aria-labelledby", "aria-describedby")
    labels = {value for _, attributes in page.tags for name, value in attributes.items() if name in names}
    assert labels | {value[1:] for value in references} <= set(identifiers)
    assert all(attributes.get("role") == "img" for tag, attributes in page.tags if tag == "svg")
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    regions = [attributes for _, attributes in page.tags if attributes.get("role") == "region"]
    assert regions
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    assert sum(tag == "table" for tag, _ in page.tags) == sum(tag == "caption" for tag, _ in page.tags)


def test_names_from_outside_are_escaped(result: dict[str, Any]) -> None:
    for entry in [*result["methods"], *result["rows"]]:
        for key in ("target", "method", "set"):
            if key in entry and entry[key] != "target":
                entry[key] = f"{ATTACK} {entry[key]}"

    page = Outline(render_result(result))

    assert "script" not in {tag for tag, _ in page.tags}
    assert "alert(" in page.text


def test_tables_name_methods_and_targets(result: dict[str, Any]) -> None:
    text = speed(result, "speed.json")

    head = "| small | falcon-8 | GSM8K | greedy | **1.50x** (1.40 to 1.70) | 1.51x | 1.33x | 3.00 |"
    assert f"{head} **3/4: greedy text changed** |" in text
    assert "| big | lookup | 421.0 | - |" in text


def test_one_method_on_one_target_needs_no_column_for_them(result: dict[str, Any]) -> None:
    alone = copy.deepcopy(result)
    alone["methods"] = [m for m in alone["methods"] if m["target"] == "small" and m["method"] in ("target", "lookup")]
    alone["rows"] = [row for row in alone["rows"] if row["target"] == "small" and row["method"] == "lookup"]

    assert "\n| set | decoding | speed-up" in speed(alone, "speed.json")


def test_a_page_stands_beside_its_results(tmp_path: Path, result: dict[str, Any]) -> None:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(result), encoding="utf-8")

    main([str(path)])

    assert path.with_suffix(".html").read_text(encoding="utf-8") == render_result(json.loads(json.dumps(result)))


@pytest.mark.browser
@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(result: dict[str, Any], width: int, scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "speed.html"
    path.write_text(render_result(result), encoding="utf-8")

    seen = seen_in_a_browser(path, width, scheme)

    assert seen["console"] == []
    assert seen["requests"] == [path.as_uri()]
    assert seen["page_width"] <= seen["width"]
    assert seen["beyond"] == []
    assert seen["focusable"] == seen["tables"]
    assert len(seen["plots"]) == 6
    assert all(plot["marks"] and all(max(mark) > 2 for mark in plot["marks"]) for plot in seen["plots"])
    is_light = {plot["color"] for plot in seen["plots"]} == {"rgb(26, 26, 26)"}
    assert is_light == (seen["page_color"] == "rgb(255, 255, 255)") == (scheme == "light")
