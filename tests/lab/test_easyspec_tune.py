"""Layers that attend at once are found on a tiny model, through the command line of the script."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.easyspec_tune import main
from tests.chat import save_target
from transformers_falcon_spec.errors import OptionError


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that drafts for itself, a model that is too shallow for that, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    for name, num_layers in (("target", 6), ("shallow", 3)):
        save_target(folder / name, max_position_embeddings=128, num_hidden_layers=num_layers)
    (folder / "sums.jsonl").write_text(
        '{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8"
    )
    return folder


def arguments(models: Path, output: Path, *options: str, drafter: str = "target") -> list[str]:
    names = ["--target", str(models / "target"), "--drafter", f"layer-parallel:2:{models / drafter}"]
    given = ["--prompts", str(models / "sums.jsonl"), "--output", str(output)]
    return [*names, *given, "--max_new_tokens", "12", *options]


def test_groups_are_measured_alone_and_together_and_a_run_goes_on_where_it_stopped(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "groups.json"
    main(arguments(models, output))
    result = json.loads(output.read_text(encoding="utf-8"))
    records = output.with_suffix(".jsonl")
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "[[0], [1], [2], [3], [4], [5]]" in capsys.readouterr().out
    records.write_text("".join(lines[:5]), encoding="utf-8")

    main(arguments(models, output))

    again = json.loads(output.read_text(encoding="utf-8"))
    assert records.read_text(encoding="utf-8").splitlines(keepends=True) == lines
    assert len(lines) in {1 + 1 + 6, 1 + 1 + 6 + 1}  # settings, no groups, 6 alone, maybe two together
    check(result)
    del result["provenance"], again["provenance"]
    assert again == result


def check(result: dict[str, Any]) -> None:
    """What every result must have in common."""
    assert result["acceptance_length_of_model"] > 1.5
    sizes = [(each["start"], each["size"]) for each in result["groups_alone"]]
    assert sizes == [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 4)]
    rows, lengths = result["divisions"], [each["acceptance_length"] for each in result["groups_alone"]]
    assert [len(row["layer_groups"]) for row in rows] == [6, 5, 4, 3]
    assert (
        rows[0]["acceptance_length"] == rows[0]["predicted_acceptance_length"] == result["acceptance_length_of_model"]
    )
    assert rows[1]["acceptance_length"] == rows[1]["predicted_acceptance_length"] == max(lengths[:3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max_new_tokens", "1"), "`max_new_tokens` must be at least 2, but it is 1"),
        (("--limit", "0"), "`limit` must be at least 1, but it is 0"),
    ],
)
def test_bad_options_are_refused(models: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        main(arguments(models, tmp_path / "groups.json", *options))


def test_other_files_and_other_drafters_are_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"`output` must end in `\.json`"):
        main(arguments(models, tmp_path / "groups.txt"))
    with pytest.raises(OptionError, match="`drafter` must be an EasySpec drafter of at least 4 layers"):
        main(arguments(models, tmp_path / "groups.json", drafter="shallow"))
