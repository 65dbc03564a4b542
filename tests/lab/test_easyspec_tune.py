"""Layers that attend at once are found on a tiny model, through the command line of the script."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.easyspec_tune import main
from tests.chat import save_target
from transformers_falcon_spec.errors import OptionError

ROOT = Path(__file__).parents[2]
LINK = ("--link_latency_us", "10", "--link_gb_per_second", "100")


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
    main(arguments(models, output, *LINK))
    result, records = json.loads(output.read_text(encoding="utf-8")), output.with_suffix(".jsonl")
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "devices: 6, layer_groups=[[0], " in capsys.readouterr().out
    records.write_text("".join(lines[:5]), encoding="utf-8")

    main(arguments(models, output, *LINK))

    again = json.loads(output.read_text(encoding="utf-8"))
    assert records.read_text(encoding="utf-8").splitlines(keepends=True)[:5] == lines[:5]
    assert counts(records) == [counts_of(json.loads(line)) for line in lines[1:]]
    assert len(lines) in {
        1 + 2 + 6,
        1 + 2 + 6 + 1,
    }  # settings, the target alone, no groups, 6 alone, maybe two together
    for found in (result, again):
        sizes = [(each["start"], each["size"]) for each in found["groups_alone"]]
        assert sizes == [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 4)]
        check(found)
    keys = ("layer_groups", "acceptance_length", "predicted_acceptance_length")
    assert [[row[key] for key in keys] for row in again["divisions"]] == [
        [row[key] for key in keys] for row in result["divisions"]
    ]


def counts_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Everything of an entry but its seconds."""
    counted = {name: value for name, value in entry["stats"].items() if not name.endswith("seconds")}
    return {"groups": entry["groups"], **counted}


def counts(records: Path) -> list[dict[str, Any]]:
    """The counts of all divisions that a file holds."""
    return [counts_of(json.loads(line)) for line in records.read_text(encoding="utf-8").splitlines()[1:]]


def check(result: dict[str, Any]) -> None:
    """What every result must have in common."""
    assert result["acceptance_length_of_model"] > 1.5
    rows, lengths = result["divisions"], [each["acceptance_length"] for each in result["groups_alone"]]
    assert [len(row["layer_groups"]) for row in rows] == [6, 5, 4, 3]
    assert (
        rows[0]["acceptance_length"] == rows[0]["predicted_acceptance_length"] == result["acceptance_length_of_model"]
    )
    assert rows[1]["acceptance_length"] == rows[1]["predicted_acceptance_length"] == max(lengths[:3])
    assert [device["devices"] for device in result["proposed"]] == list(range(1, 6 + 1))  # no more than layers
    for index, proposed in enumerate(result["proposed"]):
        rates = [row["devices"][index]["tokens_per_second"] for row in rows]
        assert proposed["tokens_per_second"] == max(rates)
        assert proposed["layer_groups"] == rows[rates.index(max(rates))]["layer_groups"]
    assert result["tokens_per_second_of_target"] > 0


def test_without_a_link_one_device_is_modelled(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "groups.json"

    main(arguments(models, output, "--limit", "1"))

    result = json.loads(output.read_text(encoding="utf-8"))
    assert [device["devices"] for device in result["proposed"]] == [1]
    assert result["model"]["link"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link_latency_us", "10"), "`link_latency_us` and `link_gb_per_second` describe a link together"),
        (("--max_new_tokens", "1"), "`max_new_tokens` must be at least 2, but it is 1"),
        (("--limit", "0"), "There must be a prompt to answer"),
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


@pytest.mark.slow
def test_links_are_measured_under_torchrun(models: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    output = tmp_path / "groups.json"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "lab.easyspec_tune", *arguments(models, output)]

    processes = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **where, "RANK": str(rank)}) for rank in range(2)
    ]

    assert [process.wait(300) for process in processes] == [0, 0]
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["model"]["link"]["bytes_per_second"] > 1e6
    assert len(result["proposed"]) == 6
