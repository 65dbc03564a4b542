"""`bench` through the command line: targets and methods by name, and failures."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chat import make_tokenizer, save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands.bench import _show
from transformers_falcon_spec.commands.loading import load_method
from transformers_falcon_spec.drafters.fingerprint import template_digest
from transformers_falcon_spec.errors import DrafterMismatchError
from transformers_falcon_spec.provenance import portable

pytestmark = pytest.mark.benchmarks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    save_target(folder / "other", seed=5)
    make_drafter(AutoModelForCausalLM.from_pretrained(target), block_size=2).save_pretrained(folder / "drafter")
    wide = save_target(folder / "wide", hidden_size=32)
    make_drafter(AutoModelForCausalLM.from_pretrained(wide), block_size=2).save_pretrained(folder / "misfit")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8")
    names = ("target", "other", "drafter", "misfit")
    return {"prompts": str(prompts), **{name: str(folder / name) for name in names}}


def bench(folders: dict[str, str], output: Path, *options: str) -> int:
    common = ["bench", "--prompts", folders["prompts"], "--output", str(output), "--max_new_tokens", "6"]
    return cli.main([*common, *options])


def test_bench_measures_every_method_on_the_target(folders: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    methods = ["--target", folders["target"], "--methods", folders["drafter"], "prompt-lookup"]

    status = bench(folders, output, *methods)

    result = json.loads(output.read_text(encoding="utf-8"))
    assert status == 0
    measured = {(row["target"], row["method"], row["decoding"]) for row in result["rows"]}
    names = ("drafter", "prompt-lookup")
    assert measured == {("target", name, decoding) for name in names for decoding in ("greedy", "temperature-0.7")}
    own = [row for row in result["rows"] if row["method"] == "drafter"]
    assert all(row["num_identical"] == row["num_compared"] == 2 for row in own)
    origin = result["provenance"]
    assert {"command", "commit", "versions", "device", "seed", "threads"} <= set(origin)
    assert origin["threads"] == torch.get_num_threads()
    assert origin["target"] == portable(folders["target"])
    assert origin["dtype"] == {"target": "float32"}
    kinds = {entry["method"]: entry["kind"] for entry in result["methods"]}
    assert kinds == {"target": "target alone", "drafter": "drafter", "prompt-lookup": "stock prompt lookup"}
    conditions = {"revision": None, "template": template_digest(make_tokenizer())}
    assert all(entry["conditions"] == conditions for entry in result["methods"])


def test_a_method_that_cannot_be_loaded_is_named_before_anything_runs(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "speed.json"

    status = bench(folders, output, "--target", folders["target"], "--methods", "prompt-lookup", folders["misfit"])

    assert status == 1
    assert "DrafterMismatchError: " in capsys.readouterr().err
    assert not output.with_suffix(".jsonl").exists()


@pytest.mark.parametrize("source", ["{}", "layer-parallel:2:{}"])
def test_a_method_that_is_not_there_is_told_before_anything_is_loaded(
    source: str, folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["prompt-lookup", source.format("/nowhere/at/all")]

    status = bench(folders, tmp_path / "x.json", "--target", "/no/target", "--methods", *methods)

    assert status == 1
    assert "A method must be a folder, or `OWNER/NAME` on the Hub, but `/nowhere/at/all` is" in capsys.readouterr().err


def test_a_target_that_is_not_there_is_named_without_a_traceback(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(folders, tmp_path / "x.json", "--target", "/nowhere/at/all", "--methods", "prompt-lookup")

    assert status == 1
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_a_folder_is_a_drafter_or_a_stock_assistant_by_its_config(folders: dict[str, str]) -> None:
    target = AutoModelForCausalLM.from_pretrained(folders["target"])

    assert load_method(folders["other"], target).kind == "stock assistant"
    assert load_method(folders["drafter"], target).kind == "drafter"
    assert load_method("prompt-lookup", target).options == {"prompt_lookup_num_tokens": 10}
    with pytest.raises(DrafterMismatchError):
        load_method(folders["misfit"], target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decodings", "hot"], "`decodings` must be some of"),
        (["--max_new_tokens", "1"], "`max_new_tokens` must be at least 2, but it is 1."),
        (["--limit", "0"], "`limit` must be at least 1, but it is 0"),
        (["--output", "x.txt"], "`output` must end in `.json`"),
    ],
)
def test_options_that_no_run_could_serve_are_refused_before_loading(
    folders: dict[str, str], tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(folders, tmp_path / "x.json", "--target", "/nowhere", "--methods", "prompt-lookup", *options)

    assert status == 1
    assert message in capsys.readouterr().err


def test_names_in_a_narrow_table_are_folded_and_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    figures = {"speedup_interval": (1.0, 1.0), "acceptance_length_pooled": 1.0, "speedup": 1.0}
    counts = {"num_identical": 1, "num_compared": 1}
    row = {"method": "m", "decoding": "temperature-0.7-top-p-0.9", "set": "s", **figures, **counts}

    _show([row])

    lines = capsys.readouterr().out.splitlines()
    shown = "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert row["decoding"] in shown
