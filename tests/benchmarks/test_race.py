"""The race: who takes part and how, what does not fit, and the tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import race
from benchmarks.entrants import Entrant, entries_of, loaded, measured_acceptance, training_of
from benchmarks.inflation import Shape
from benchmarks.race import REPORT, chosen_dtype, inflated
from benchmarks.standings import standings
from tests.benchmarks.test_standings import SECONDS, runs
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError
from transformers_falcon_spec.provenance import provenance


@pytest.fixture
def target() -> PreTrainedModel:
    """A target of four layers."""
    return make_target(num_hidden_layers=4)


def test_drafters_of_every_kind_take_part_at_the_large_cost(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    make_drafter(target).save_pretrained(tmp_path / "falcon")
    peaked_dflash(target).save_pretrained(tmp_path / "dflash")
    make_target(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    shape = Shape(256, 384, 5, 4, 2, 64, 400)

    folders = [str(tmp_path / name) for name in ("falcon", "dflash", "small")]
    entries = {entry.name: entry for entry in entries_of(folders)}
    found = {
        name: inflated(loaded(entries[name], target), entries[name].source, target, shape, dtype=torch.float32)
        for name in ("falcon", "dflash", "dflash-tree", "small")
    }

    assert [*entries] == ["falcon", "dflash", "small", "dflash-tree", "prompt-lookup"]
    kinds = {name: (method.kind, method.assistant.config.hidden_size) for name, method in found.items()}
    assert kinds == {
        "falcon": ("drafter", 256),
        "dflash": ("stock block diffusion", 256),
        "dflash-tree": ("drafter", 256),
        "small": ("stock assistant", 256),
    }
    lookup = loaded(Entrant("prompt-lookup", "prompt-lookup"), target)
    assert inflated(lookup, "prompt-lookup", target, shape, dtype=torch.float32) is lookup


def test_without_a_shape_all_are_as_they_come(target: PreTrainedModel, tmp_path: Path) -> None:
    make_drafter(target).save_pretrained(tmp_path / "falcon")
    entry = Entrant("falcon", str(tmp_path / "falcon"))

    method = inflated(loaded(entry, target), entry.source, target, None, dtype=torch.bfloat16)

    assert method.assistant is not None
    assert method.assistant.dtype == torch.bfloat16
    assert method.assistant.config.hidden_size == target.config.hidden_size


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"`--drafters` must name folders with a `config.json` each, but .* have none"
    ):
        entries_of([str(tmp_path)])


def test_two_folders_of_one_name_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        make_drafter(target).save_pretrained(tmp_path / parent / "falcon")

    with pytest.raises(OptionError, match=r"must have names of their own, but `falcon` is that of two"):
        entries_of([str(tmp_path / "a" / "falcon"), str(tmp_path / "b" / "falcon")])


@pytest.mark.parametrize("kind", ["falcon", "dflash", "small", "broken"])
def test_a_folder_that_does_not_fit_the_target_is_named_before_anything_runs(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    other = make_target(num_hidden_layers=4, vocab_size=300, hidden_size=48, num_attention_heads=2)
    makers: dict[str, Any] = {"falcon": make_drafter, "dflash": peaked_dflash, "small": lambda model: model}
    if kind == "broken":
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text('{"model_type": "falcon_spec"', encoding="utf-8")
    else:
        makers[kind](other).save_pretrained(tmp_path / kind)

    with pytest.raises(DrafterMismatchError, match=rf"must fit the target, but `.*{kind}` does not: "):
        loaded(Entrant(kind, str(tmp_path / kind)), target)


def test_a_dflash_drafter_of_a_deeper_target_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    peaked_dflash(target).save_pretrained(tmp_path / "dflash")

    with pytest.raises(DrafterMismatchError, match="It reads layers"):
        loaded(Entrant("dflash", str(tmp_path / "dflash")), make_target(num_hidden_layers=1))


@pytest.mark.parametrize("options", ["--learning_rate 4e-3 --drafter start", "--learning_rate=4e-3 --drafter=start"])
def test_what_a_drafter_was_trained_for_is_read_from_its_folder(options: str, tmp_path: Path) -> None:
    record = {
        "command": f"cli.py train --method eagle {options} --output_dir eagle",
        "recipe": {"name": "default", "training": {"learning_rate": 1.0}},
        "curve": [{"step": 1, "eval_accuracy_at_1": 0.5}, {"step": 10, "epoch": 2.5}],
        "num_examples": 40,
        "seed": 7,
    }
    (tmp_path / "training.json").write_text(json.dumps(record), encoding="utf-8")

    found = training_of(Entrant("eagle", str(tmp_path)))
    assert training_of(Entrant("eagle", str(tmp_path), is_in_our_loop=True)) == found

    assert found == {
        "method": "eagle",
        "num_steps": 10,
        "num_readings": 100,
        "num_examples": 40,
        "learning_rate": 4e-3,
        "start": "start",
        "seed": 7,
        "accuracy": 0.5,
        "command": record["command"],
    }
    assert training_of(Entrant("prompt-lookup", "prompt-lookup")) is None


def test_bfloat16_takes_part_only_where_the_processor_has_instructions_for_it(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"output": tmp_path / "race.json", "target": "small", "shape": "0.3b", "device": "cpu"}
    args: Any = type("Args", (), options)
    shape = Shape.of(target.config)
    monkeypatch.setattr(race, "processor_flags", lambda: ["avx2"])
    monkeypatch.setattr(race, "faster_dtype", lambda *_: "bfloat16")

    assert chosen_dtype(target, shape, args) == "float32"
    monkeypatch.setattr(race, "processor_flags", lambda: ["avx2", "avx512_bf16"])
    assert chosen_dtype(target, shape, args) == "bfloat16"
    monkeypatch.setattr(race, "faster_dtype", lambda *_: "float32")
    assert chosen_dtype(target, shape, args) == "bfloat16"  # a run that goes on
    monkeypatch.setattr(race, "processor_flags", list)
    args.device = "cuda"
    assert chosen_dtype(target, shape, args) == "bfloat16"


def test_acceptance_is_that_of_the_last_evaluation() -> None:
    folder = Path(__file__).parents[2] / "models" / "falcon-reference"

    found = measured_acceptance(folder, block_size=6)

    last = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"][-1]
    assert len(found) == 6
    for place, shares in enumerate(found.tolist(), start=1):
        assert shares == pytest.approx([last[f"eval_rank_{rank}_at_{place}"] for rank in range(len(shares))])


def test_the_tables_show_training_speed_and_standings() -> None:
    rows = [
        {
            "decoding": "greedy",
            "method": method,
            "set": name,
            "speedup": 10.0 / seconds,
            "speedup_interval": [1.0, 4.0],
            "acceptance_length_pooled": 3.25,
        }
        for method, sets in SECONDS.items()
        if method != "target"
        for name, seconds in sets.items()
    ]
    origin = provenance(seed=0, target="a/model", shape="0.3b", dtype="bfloat16", limit=25, max_new_tokens=64)
    trained = {"method": "falcon", "num_steps": 10, "num_readings": 100, "num_examples": 40, "learning_rate": 4e-3}
    result = {
        "provenance": origin,
        "rows": rows,
        "trained": [{**trained, "start": None, "accuracy": 0.75}],
        "standings": standings(runs(), ["falcon", "falcon5"]),
    }

    text = REPORT.render(result, "race.json")

    assert text.startswith("### The race, measured\n\nAll inflated to `0.3b`, bfloat16")
    origin["shape"] = str(None)  # as options are written
    assert "\n\nOf `a/model`, bfloat16" in REPORT.render(result, "race.json")
    assert REPORT.render(result, "unlike.json").startswith("### Where drafting can hardly pay, measured")
    assert "| falcon | 10 | 100 | 0.004 | 0.750 |" in text
    assert "| falcon5 | 5.00x (1.00 to 4.00), 3.25 tokens | 2.50x (1.00 to 4.00), 3.25 tokens |" in text
    assert f"| greedy | falcon5 | lookup | {11 / 6:.2f} (" in text
