"""Tables come from results files and stand between the markers."""

import json
from pathlib import Path

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.report import BEGIN, END, PAGES, render_into
from transformers_falcon_spec.provenance import provenance


def test_tables_replace_what_stood_between_the_markers(tmp_path: Path) -> None:
    results, document = tmp_path / "results", tmp_path / "parity.md"
    results.mkdir()
    row = {"decoding": "greedy", "num_prompts": 200, "num_tokens": 25000, "identical": 199, "tie": 1, "bug": 0}
    row["tokens_per_step"] = 2.5
    result = {"provenance": provenance(seed=0, dtype="float32", max_new_tokens=64), "rows": [row]}
    (results / "parity.json").write_text(json.dumps(result), encoding="utf-8")
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")

    render_into(document, results)

    text = document.read_text(encoding="utf-8")
    assert "At most 64 new tokens a text, float32." in text
    assert "| greedy | 200 | 25000 | 2.50 | 199 | 1 | 0 |" in text
    assert "Source: `benchmarks/results/parity.json`; commit `" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("no markers", encoding="utf-8")

    with pytest.raises(OptionError, match=r"README\.md` must hold the lines"):
        render_into(document, tmp_path)


def test_verifiers_and_batches_stand_on_their_own_pages_and_not_in_the_readme(tmp_path: Path) -> None:
    rate = {"speedup": 1.21, "speedup_interval": [1.1, 1.3], "acceptance_length": 2.25}
    counts = {"acceptance_histogram": {"0": 3, "5": 1}, "num_tokens": 10, "num_prompts": 1}
    verifier = {
        "arm": "gumbel",
        "set": "gsm8k",
        "acceptance_length_interval": [2.0, 2.5],
        "step_cost": 1.9,
        **rate,
        **counts,
    }
    arm = {"tokens_per_second": 80.0, "num_identical": 7, "num_rows": 8, **rate}
    batch = {"size": 4, "target_tokens_per_second": 100.4, "tuned": arm, "every_step": {**arm, "num_identical": 6}}
    for name, row in (("verifiers", verifier), ("batches", batch)):
        result = {"provenance": provenance(seed=0), "rows": [row]}
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    pages = [tmp_path / name for name in ("verifiers.md", "batches.md", "README.md")]
    for page in pages:
        page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
        render_into(page, tmp_path)

    assert "| `gumbel` | GSM8K | 2.25 (2.00 to 2.50) | 1.90 | 1.21x (1.10 to 1.30) |" in pages[0].read_text("utf-8")
    shown = pages[1].read_text("utf-8")
    assert "| 4 | 100 tokens/s | as the tuner chooses | 80 | 1.21 (1.10 to 1.30) | 2.25 | 7/8 |" in shown
    assert "| 4 | 100 tokens/s | in every step | 80 | 1.21 (1.10 to 1.30) | 2.25 | 6/8 |" in shown
    assert "gumbel" not in pages[1].read_text("utf-8")
    assert pages[2].read_text("utf-8") == f"{BEGIN}\n\n{END}\n"


def test_drafters_stand_beside_each_other_by_rate_and_by_nodes(tmp_path: Path) -> None:
    runs = [
        {"name": "falcon", "learning_rate": 2e-3, "num_steps": 8000, "loss": 1.5, "accuracy": [0.7, 0.5]},
        {"name": "eagle", "learning_rate": 4e-3, "num_steps": 8000, "loss": 0.5, "accuracy": [0.72]},
    ]
    shares = {
        "decoding": "greedy",
        "acceptance_length_pooled_interval": [2.0, 3.0],
        "acceptance_by_depth": [0.8, 0.625],
    }
    rows = [
        {**shares, "method": method, "num_nodes": num_nodes, "set": set_name, "acceptance_length_pooled": length}
        for method, num_nodes, set_name, length in (
            ("falcon", 4, "gsm8k", 2.25),
            ("falcon", 16, "gsm8k", 2.5),
            ("falcon", 16, "mt_bench", 1.75),
            ("eagle", 16, "gsm8k", 3.0),
        )
    ]
    for name, found in (("training", {"rows": runs, "description": ["Alike."]}), ("depths", {"rows": rows})):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"provenance": provenance(seed=0), **found}), encoding="utf-8"
        )
    page = tmp_path / "rivals.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")

    render_into(page, tmp_path)

    text = page.read_text(encoding="utf-8")
    assert "| falcon | 0.002 | 8000 | 1.500 | 0.700 | 0.500 |" in text
    assert "| eagle | 0.004 | 8000 | 0.500 | 0.720 | - |" in text
    assert "| method | nodes | GSM8K | MT-Bench |" in text
    assert "| falcon | 4 | 2.25 (2.00 to 3.00) | - |" in text
    assert "| falcon | 16 | 2.50 (2.00 to 3.00) | 1.75 (2.00 to 3.00) |" in text
    assert "| eagle | 16 | 3.00 (2.00 to 3.00) | - |" in text
    assert "| falcon | MT-Bench | 1.75 (2.00 to 3.00) | 0.80 0.62 |" in text


def test_ways_to_adapt_a_drafter_stand_on_the_page_on_training(tmp_path: Path) -> None:
    found = {"acceptance_length_interval": [2.0, 3.0], "num_identical": 39, "num_prompts": 40}
    nothing = {"num_trained": 0, "bytes": 0, "seconds": 0.0}
    rows = [
        {"name": "as published", "acceptance": {"greedy": {**found, "acceptance_length": 2.125}}, **nothing},
        {
            "name": "LoRA",
            "acceptance": {"greedy": {**found, "acceptance_length": 2.75}},
            "num_trained": 200_000,
            "bytes": 800_000,
            "seconds": 90.0,
        },
    ]
    sizes = {"tune_steps": 300, "rows": 800, "steps": 250, "prompts": 40, "per_device_train_batch_size": "8"}
    seconds = {"fine-tuning of the target": 500.0, "answers": 60.0, "features": 30.0, "LoRA": 100.0}
    result = {"provenance": {**provenance(seed=0), **sizes}, "stage_seconds": seconds, "rows": rows}
    (tmp_path / "lora.json").write_text(json.dumps(result), encoding="utf-8")
    page = tmp_path / "train_your_own.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")

    render_into(page, tmp_path)

    text = page.read_text(encoding="utf-8")
    assert "| as published | 2.12 (2.00 to 3.00) | - | - | - |" in text
    assert "| LoRA | 2.75 (2.00 to 3.00) | 0.20 M | 0.8 MB | 1.5 min |" in text
    assert "78 of 80 texts are the target's own." in text
    assert "which all ways share, took 1.5 min." in text
    assert "`benchmarks/results/lora.json`" in text


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_every_page_holds_what_the_results_files_say(name: str, tmp_path: Path) -> None:
    shipped, copy = Path(name), tmp_path / Path(name).name
    copy.write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")

    render_into(copy, Path("benchmarks/results"))

    assert copy.read_text(encoding="utf-8") == shipped.read_text(encoding="utf-8")
