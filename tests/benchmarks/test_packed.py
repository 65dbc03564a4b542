"""Packed weights beside stock layers: cases stand side by side, a repeated one replaces itself, and tables hold what was measured."""

import json
from pathlib import Path

from benchmarks import packed as script
from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec.commands.loading import load_target


def test_a_case_is_measured_and_takes_the_place_of_its_older_self(tmp_path: Path) -> None:
    target, drafter, prompts = save_target(tmp_path / "target"), tmp_path / "drafter", tmp_path / "prompts.jsonl"
    make_drafter(load_target(str(target), "float32", "cpu")[0], block_size=2).save_pretrained(drafter)
    prompts.write_text('{"id": "a", "prompt": "one plus seven"}\n', encoding="utf-8")
    output = tmp_path / "packed.json"
    command = ["--target", str(target), "--drafter", str(drafter), "--prompts", str(prompts), "--output", str(output)]
    command += ["--threads", "1", "--max_new_tokens", "6", "--decodings", "greedy"]

    script.main(command)
    first = json.loads(output.read_text("utf-8"))
    other = {**first["cases"][0], "shape": "0.3b"}
    script.add_case(output, other)
    script.add_case(output, {**other, "rows": first["cases"][0]["rows"][:1]})

    (row, packed), result = first["cases"][0]["rows"], json.loads(output.read_text("utf-8"))
    assert (row["method"], packed["method"]) == (script.STOCK, script.PACKED)
    assert row["beside_stock"]["ratio"] == 1
    assert [len(case["rows"]) for case in result["cases"]] == [2, 1]
    text = script.REPORT.render(result, "packed.json")
    assert "| embedded | CPU, " in text
    assert "| at the cost of 0.3b | CPU, " in text
    assert f"| {packed['beside_target']['ratio']:.2f}x (" in text
