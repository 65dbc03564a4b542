"""`export` through the command line."""

import json
from pathlib import Path

import pytest

from tests.convert.exports import eagle
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import cli


@pytest.mark.parametrize("form", ["speculators", "vllm", "sglang"])
def test_a_saved_drafter_is_written_in_the_form_that_is_asked_for(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eagle().save_pretrained(tmp_path / "drafter")
    dest = tmp_path / "dest"

    assert cli.main(["export", str(tmp_path / "drafter"), str(dest), "--format", form]) == 0

    assert f"{dest} holds {tmp_path / 'drafter'} in the form of {form}." in capsys.readouterr().out
    config = json.loads((dest / "config.json").read_text(encoding="utf-8"))
    assert ("speculators_model_type" in config, "eagle_config" in config) == (form == "speculators", form == "sglang")


def test_a_drafter_that_no_engine_takes_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_drafter(make_target("llama")).save_pretrained(tmp_path / "drafter")
    capsys.readouterr()  # what saving shows

    assert cli.main(["export", str(tmp_path / "drafter"), str(tmp_path / "dest"), "--format", "vllm"]) == 1

    assert capsys.readouterr().err.startswith(
        "OptionError: Only an `EagleDrafter` or a `DFlashDrafter` can be exported"
    )
    assert not (tmp_path / "dest").exists()


def test_a_format_that_there_is_not_is_refused_with_the_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "drafter", str(tmp_path / "dest"), "--format", "onnx"])

    said = capsys.readouterr().err
    assert all(name in said for name in ("onnx", "speculators", "vllm", "sglang"))
