"""`calibrate` through the command line, on a tiny pair saved to disk."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.drafters.dflash.makers import make_dflash_drafter
from tests.tiny import make_drafter
from transformers_falcon_spec import DFlashDrafter, FalconSpecDrafter, LookaheadDrafter, cli

pytestmark = pytest.mark.benchmarks

Pair = dict[str, str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A drafter that knows its target's own features, so that paths are kept, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = AutoModelForCausalLM.from_pretrained(save_target(folder / "target"))
    make_drafter(target, block_size=1).save_pretrained(folder / "drafter")
    LookaheadDrafter.from_target(target).save_pretrained(folder / "lookahead")
    make_dflash_drafter(target, block_size=3).save_pretrained(folder / "dflash")
    prompts = folder / "sums.jsonl"
    words = ["one plus two", "three", "four minus one", "two times two"]
    rows = [json.dumps({"id": str(number), "prompt": text}) + "\n" for number, text in enumerate(words)]
    prompts.write_text("".join(rows), encoding="utf-8")
    names = ("target", "drafter", "lookahead", "dflash")
    return {name: str(folder / name) for name in names} | {"prompts": str(prompts)}


def calibrate(pair: Pair, output: Path, *options: str, drafter: str = "drafter") -> int:
    given = ["--target", pair["target"], "--drafter", pair[drafter], "--prompts", pair["prompts"]]
    return cli.main(["calibrate", *given, "--output", str(output), "--max_new_tokens", "24", *options])


@pytest.fixture(scope="module")
def done(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done")
    output = folder / "calibration.json"
    assert calibrate(pair, output, "--save") == 0
    return output


def test_the_fit_is_stored_and_nothing_else_changes(pair: Pair, done: Path) -> None:
    result = json.loads(done.read_text(encoding="utf-8"))

    drafter = FalconSpecDrafter.from_pretrained(pair["drafter"])

    assert drafter.config.confidence_temperatures == result["fit"]
    fresh = make_drafter(AutoModelForCausalLM.from_pretrained(pair["target"]), block_size=1)
    assert all(weight.equal(drafter.state_dict()[name]) for name, weight in fresh.state_dict().items())
    assert drafter.generation_config.dynamic_tree is None
    assert {"command", "commit", "versions", "device", "seed"} <= set(result["provenance"])


def test_a_run_goes_on_where_it_stopped(pair: Pair, done: Path, tmp_path: Path) -> None:
    output = tmp_path / "again.json"
    lines = done.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    output.with_suffix(".jsonl").write_text("".join(lines[:10]), encoding="utf-8")

    assert calibrate(pair, output) == 0

    assert output.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines(keepends=True) == lines
    results: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in (done, output)]
    assert results[0]["fit"] == results[1]["fit"]


def test_a_drafter_that_grows_no_trees_is_refused_before_any_text_is_written(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(pair, tmp_path / "calibration.json", drafter="lookahead") == 1
    assert "Calibration needs a drafter that grows trees" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_too_few_prompts_are_refused_in_words(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(pair, tmp_path / "calibration.json", "--limit", "1", "--max_new_tokens", "8") == 1
    assert "The first position needs at least 20 tokens, greedy and sampled" in capsys.readouterr().err


def test_a_limit_below_1_leaves_out_no_prompt_in_silence(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(pair, tmp_path / "calibration.json", "--limit", "-1") == 1
    assert "`limit` must be at least 1, but it is -1" in capsys.readouterr().err


def test_names_that_cannot_be_written_are_refused_before_anything_is_loaded(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(pair, tmp_path / "calibration.txt") == 1
    assert "`output` must end in `.json`" in capsys.readouterr().err

    assert calibrate({**pair, "drafter": "someone/drafter"}, tmp_path / "calibration.json", "--save") == 1
    message = "`drafter` must be a folder that holds one, but it is `someone/drafter`"
    assert message in capsys.readouterr().err


def test_a_block_of_masks_is_calibrated_to_its_end_and_no_further(pair: Pair, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair["target"])
    make_dflash_drafter(target, block_size=2).save_pretrained(tmp_path / "dflash")
    folders = {**pair, "dflash": str(tmp_path / "dflash")}

    assert calibrate(folders, tmp_path / "x.json", "--save", drafter="dflash") == 0

    fitted = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["fit"]
    assert [len(values) for values in fitted.values()] == [1, 1]
    assert DFlashDrafter.from_pretrained(tmp_path / "dflash").config.confidence_temperatures == fitted
