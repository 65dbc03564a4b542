"""What the benchmarks of DiffuSpec work out from counts and seconds, and that they run from begin to end and go on where they stopped."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import diffuspec_speed
from benchmarks.diffuspec_speed import own_methods, phases
from benchmarks.diffuspec_variants import BOTH, CPS, FITTED, METHOD, proxies_of, variants_of
from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from transformers_falcon_spec import DiffusionDrafter, OptionError
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.provenance import provenance

SETS = ("sums", "texts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter of its own layers for each kind of attention, conversations and prompts."""
    folder = tmp_path_factory.mktemp("models")
    target, _ = load_target(
        str(save_target(folder / "target", max_position_embeddings=128, head_dim=16)), "float32", "cpu"
    )
    for kind in ("prefix_causal", "full"):
        made = DiffusionDrafter.from_target(target, num_hidden_layers=3, block_size=4, attention=kind)
        made.save_pretrained(folder / kind)
    write_rows(folder / "answered.jsonl", make_rows(5))
    for number, name in enumerate(SETS):
        rows = [{"id": word, "prompt": f"{word} plus {number} seven"} for word in ("one", "five")]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def call(monkeypatch: pytest.MonkeyPatch, script: Any, models: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run a script; what it wrote."""
    given = ["--target", str(models / "target"), "--output", str(output), *options]
    monkeypatch.setattr(sys, "argv", ["script", *given])
    script.main()
    return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def of_drafters(models: Path, *names: str) -> list[str]:
    prompts = [str(models / f"{name}.jsonl") for name in SETS]
    drafters = [f"{name}={models / name}" for name in names]
    proxy = ["--proxy_texts", str(models / "answered.jsonl")]
    return ["--drafters", *drafters, *proxy, "--prompts", *prompts, "--max_new_tokens", "8"]


def loaded(models: Path, name: str) -> DiffusionDrafter:
    drafter: DiffusionDrafter = DiffusionDrafter.from_pretrained(models / name)
    return drafter


def test_variants_differ_in_one_factor_and_leave_the_drafter_as_it_is(models: Path) -> None:
    drafter = loaded(models, "full")
    before, proxies = drafter.config.to_dict(), proxies_of(models / "answered.jsonl", make_tokenizer(), 97)
    variants = {(variant.factor, variant.value): variant.of(drafter, proxies) for variant in variants_of(drafter)}
    base = variants[METHOD, CPS]

    changed = {
        key: {name for name, value in variant.draft_settings.items() if value != base.draft_settings.get(name)}
        for key, variant in variants.items()
    }

    assert len(variants) == len(variants_of(drafter))
    assert base.proxy is proxies[FITTED] is not None
    assert changed.pop((METHOD, CPS)) == set()
    assert changed.pop((METHOD, BOTH)) == {"draft_length", "min_draft_tokens", "growth"}
    assert changed["mass tau", "0.5"] == {"mass"}
    assert changed["proxy", "none"] == {"proxy"}
    assert changed["tree", "8 nodes"] == {"search", "num_tree_nodes"}
    assert changed["rounds that share a cache", "4"] == {"cache_rounds"}
    assert all(changed.values())  # every variant differs, in what drafts depend on
    assert {variant[0] for variant in changed} >= {"beam width B", "candidates M_max", "fixed length k", "passes S"}
    assert not any(
        variant.factor == "rounds that share a cache" for variant in variants_of(loaded(models, "prefix_causal"))
    )
    assert drafter.config.to_dict() == before
    assert drafter.proxy is None


def test_a_round_is_made_of_its_phases() -> None:
    seconds = {"draft_seconds": 2.0, "search_seconds": 0.5, "verify_seconds": 4.0, "prefill_seconds": 1.0}
    counted = {"num_steps": 10, "num_accepted": 10, "acceptance_histogram": {}, "total_seconds": 11.0, **seconds}

    found = phases([{"speculation": counted, "num_tokens": 20, "seconds": 8.0}])

    names = ("draft_seconds", "search_seconds", "verify_seconds", "other_seconds", "search_share")
    assert [found[name] for name in names] == pytest.approx([0.15, 0.05, 0.4, 0.4, 0.05])
    assert (found["tokens_per_second"], found["acceptance_length"]) == (2.5, 2.0)


@pytest.mark.parametrize("shape", [None, "tiny"])
def test_every_variant_and_method_writes_the_targets_text(
    shape: str | None, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        diffuspec_speed.SHAPES, "tiny", diffuspec_speed.SHAPES["0.3b"].__class__(256, 160, 5, 4, 2, 64, 400)
    )
    threads = ("--threads", str(torch.get_num_threads()))
    methods = ("--methods", f"stock={models / 'target'}", "prompt-lookup:3", f"other={models / 'full'}")
    variants = (
        "--variants",
        "CPS",
        "tree 16 nodes, tuned",
        "--limit",
        "1",
        *threads,
        *methods,
        *(("--shape", shape) if shape else ()),
    )

    result = call(
        monkeypatch, diffuspec_speed, models, tmp_path / "speed.json", *of_drafters(models, "prefix_causal"), *variants
    )

    names = ["prefix_causal: CPS", "prefix_causal: tree 16 nodes, tuned", "stock", "prompt-lookup:3", "other"]
    found = {row["method"]: row for row in result["side_by_side"]}
    assert sorted(found) == sorted(names)
    assert all(row["num_identical"] == row["num_compared"] == 1 for row in result["rows"])
    assert {row["set"] for row in result["rows"]} == set(SETS)
    for name in names[:2]:
        assert found[name]["search_seconds"] > 0
        assert 0 < found[name]["search_share"] < 1
    assert found["stock"]["search_seconds"] == 0
    shares = {method["method"]: method["settings"] for method in result["methods"] if method["method"] in names[:2]}
    assert shares["prefix_causal: CPS"]["search"] == "cps"
    assert shares["prefix_causal: tree 16 nodes, tuned"]["num_tree_nodes"] == 16


def test_drawn_marginals_are_accepted_as_draws_and_unknown_variants_are_refused(models: Path) -> None:
    proxies = proxies_of(models / "answered.jsonl", make_tokenizer(), 97)
    variants = ["drawn marginals", "CPS", "CPS, tuned"]

    drawn, searched, tuned = own_methods("own", loaded(models, "full"), variants, proxies)

    options = [method.assistant.generation_config for method in (drawn, searched, tuned)]
    assert [each.verifier for each in options] == ["recursive_rejection", "token_matching", "token_matching"]
    assert [each.tune for each in options] == [False, False, True]
    assert drawn.assistant.config.search == "marginal"
    with pytest.raises(OptionError, match="A variant of `own` must be one of"):
        list(own_methods("own", loaded(models, "full"), ["tree of life"], proxies))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("diffuspec_speed.json", "None", "the reference target"),
        ("diffuspec_speed_0.3b.json", "0.3b", "the target inflated to `0.3b`"),
    ],
)
def test_methods_stand_by_speed_with_the_share_of_searching(name: str, shape: str, words: str) -> None:
    phases = {"draft_seconds": 0.004, "search_seconds": 0.00025, "verify_seconds": 0.008, "other_seconds": 0.001}
    common = {"decoding": "greedy", "num_prompts": 15, "acceptance_length": 2.5}
    rows = [
        {
            **common,
            **phases,
            "method": name,
            "tokens_per_second": speed,
            "search_share": share,
            "beside_target": beside,
        }
        for name, speed, share, beside in (
            ("prefix: CPS", 80.44, 0.0189, {"ratio": 0.9, "interval": [0.8, 1.0]}),
            ("falcon", 120.0, 0.0, {"ratio": 1.25, "interval": [1.0, 1.5]}),
        )
    ]
    rows[1]["search_seconds"] = 0.0
    by_set = [
        {
            "decoding": "greedy",
            "set": "gsm8k",
            "method": row["method"],
            "speedup": 1.5,
            "speedup_interval": [1.25, 1.75],
        }
        for row in rows
    ]
    settings = {"shape": shape, "dtype": "float32", "max_new_tokens": "96"}

    text = diffuspec_speed.REPORT.render(
        {"provenance": provenance(seed=0, **settings), "side_by_side": rows, "rows": by_set}, name
    )

    assert f"### Speed with {words}, float32, " in text
    assert "| method | tokens/s | acceptance length | all sets | GSM8K | searching |" in text
    fast = "| falcon | 120.0 | 2.50 | 1.25x (1.00 to 1.50) | 1.50x (1.25 to 1.75) | - |"
    assert f"{fast}\n| prefix: CPS | 80.4 | 2.50 | 0.90x (0.80 to 1.00) | 1.50x (1.25 to 1.75) | 1.9 % |" in text
    assert f"Source: `benchmarks/results/{name}`" in text
