"""The ablation of the recipe: objectives that do what they are called, arms that the command line takes, each trained once, and a table."""

import argparse
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import falcon_objectives, recipe_ablation
from benchmarks.falcon_objectives import VARIANTS
from tests.tiny import make_target
from tests.training.runs import example_batch, make_trainer
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands import train as train_command
from transformers_falcon_spec.commands.train_drafter import fresh_drafter
from transformers_falcon_spec.drafters.registry import METHODS
from transformers_falcon_spec.evaluation.training_tables import recipe_ablation as table_of
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.training.objectives import falcon


def objective_of(name: str, trainer: Any) -> Any:
    return VARIANTS[name](trainer.drafter, trainer.features, trainer.args)


def naive_rows(name: str, draft: Tensor, target: Tensor, places: list[int]) -> list[float]:
    """The loss of each row, entry by entry."""
    p, q = target.double().softmax(-1), draft.double().softmax(-1)

    def divergence(one: Tensor, other: Tensor) -> float:
        return sum(float(a * (a / b).log()) for a, b in zip(one, other, strict=True))

    forward = [divergence(p[row], q[row]) for row in range(len(p))]
    entropy = [-float(q[row, p[row].argmax()].log()) for row in range(len(p))]
    if name == "by_reach":
        overlap = [sum(min(float(a), float(b)) for a, b in zip(p[row], q[row], strict=True)) for row in range(len(p))]
        weights = []
        for place in places:
            weight = 1.0
            for before in range(place):
                found = [each for each, where in zip(overlap, places, strict=True) if where == before]
                weight *= sum(found) / len(found)
            weights.append(weight)
        mean = sum(weights) / len(weights)
        return [(0.9 * forward[row] + 0.1 * entropy[row]) * weights[row] / mean for row in range(len(p))]
    return {
        "forward_kl": forward,
        "cross_entropy": entropy,
        "reverse_kl": [divergence(q[row], p[row]) for row in range(len(p))],
    }[name]


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy", "reverse_kl", "by_reach"])
def test_a_loss_is_what_its_name_says(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 3}, feature_loss_weight=0.5, token_loss_weight=2.0)
    draft, target = torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)).unbind()
    features, labels = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(1)).unbind()
    places = [0, 1, 2, 0, 1, 0, 2]

    total, terms = objective_of(name, trainer).loss(features, labels, draft, target, torch.tensor(places))

    rows = naive_rows(name, draft, target, places)
    regression = torch.nn.functional.smooth_l1_loss(features, labels).item()
    assert terms["tokens"].item() == pytest.approx(sum(rows) / 7, rel=1e-4)
    assert total.item() == pytest.approx(0.5 * regression + 2.0 * sum(rows) / 7, rel=1e-4)


@pytest.mark.parametrize(("name", "phases"), [("fixed_phase", [0] * 6), ("forward_kl", None)])
def test_blocks_start_where_they_are_told(tmp_path: Path, name: str, phases: list[int] | None) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 3}, use_glancing=False)
    seen: list[list[int]] = []
    trainer.model.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[2].tolist()))

    objective_of(name, trainer)(
        trainer.model, trainer.features(example_batch(num_rows=6)), torch.Generator().manual_seed(0), 0.5
    )

    assert seen[0] == phases if phases else len(set(seen[0])) > 1


def test_held_glancing_shows_as_much_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 2}, glancing_ratio=0.5)
    budgets: list[int] = []
    monkeypatch.setattr(falcon, "reveal_mask", _noting(falcon.reveal_mask, lambda args: budgets.append(args[3])))
    pairs = trainer.features(example_batch())

    for progress in (0.0, 1.0):
        objective_of("held_glancing", trainer)(trainer.model, pairs, torch.Generator().manual_seed(0), progress)

    assert budgets[0] == budgets[1] > 0


def _noting(function: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(args)
        return function(*args, **kwargs)

    return noted


def test_whole_blocks_are_fed_what_was_expected_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(falcon_objectives, "OWN_SHARE", 0.5)
    trainer = make_trainer(tmp_path, {"block_size": 3}, use_glancing=False, feature_noise=0.0)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    trainer.model.register_forward_hook(lambda _module, inputs, output: calls.append((*inputs[1:3], output)))
    trainer.model.train()
    for dropout in (
        module for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout | torch.nn.LSTM)
    ):
        dropout.eval()
    pairs = trainer.features(example_batch(num_rows=8))

    objective_of("own_features", trainer)(trainer.model, pairs, torch.Generator().manual_seed(0), 0.5)

    (clean, phases, expected), (fed, _, _) = calls
    is_own_block: dict[tuple[int, int], bool] = {}
    for row in range(8):
        for place in range(fed.shape[1]):
            is_own = not fed[row, place].equal(clean[row, place])
            if is_own:
                torch.testing.assert_close(fed[row, place], expected[row, place - 3].to(fed), rtol=0, atol=0)
            assert place >= 3 or not is_own
            if place >= 3:
                block = (place - int(phases[row])) // 3
                assert is_own_block.setdefault((row, block), is_own) == is_own
    assert 0.3 < sum(is_own_block.values()) / len(is_own_block) < 0.7


def test_a_command_is_done_with_the_objective_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "falcon", METHODS["falcon"])
    told: list[Any] = []
    monkeypatch.setattr(cli, "main", lambda argv: told.append((argv, METHODS["falcon"].objective)))

    falcon_objectives.main(["reverse_kl", "train", "--max_steps", "3"])

    assert told == [(["train", "--max_steps", "3"], falcon_objectives.ReverseDivergence)]
    with pytest.raises(SystemExit, match=r"The first word must be one of .*reverse_kl"):
        falcon_objectives.main(["backwards", "train"])


@pytest.mark.parametrize("name", [*recipe_ablation.ARMS])
def test_every_arm_is_a_command_and_a_drafter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, asked = [], []
    monkeypatch.setattr(
        recipe_ablation, "run_command", lambda _folder, *command, module="": commands.append((module, command))
    )
    monkeypatch.setattr(train_command, "run", wraps(train_command.run)(lambda *options: asked.append(options)))
    args = argparse.Namespace(
        runs=tmp_path, target="models/reference-target", data="a.jsonl", eval_data="b.jsonl", steps=7
    )

    recipe_ablation.train(name, args)

    ((module, command),) = commands
    if module:
        assert command[0] == recipe_ablation.ARMS[name].objective in VARIANTS
        command = command[1:]
    assert cli.main(list(command)) == 0
    options, training, _lora, _given = asked[0]
    assert training.max_steps == 7
    data = argparse.Namespace(examples=[{"input_ids": [*range(50)], "assistant_mask": [1] * 50}])
    options.drafter_config = [  # the target of this test has fewer layers and a smaller vocabulary
        field.replace("[3,7,-1]", "[1,-1]").replace("2048", "40") for field in options.drafter_config or []
    ]
    drafter: Any = fresh_drafter(options, make_target(), data)
    for field in options.drafter_config:
        key, _, value = field.partition("=")
        assert str(getattr(drafter.config, key)).lower() in (value.replace(",", ", "), value.replace("null", "none"))


def test_one_arm_writes_the_features_that_others_read() -> None:
    names = ["two layers", "Eagle-3, all tokens drafted", "default", "Eagle-3, 2,048 tokens drafted"]

    assert {*recipe_ablation.readers(names)} == {"two layers", "Eagle-3, all tokens drafted"}


def test_an_arm_that_is_trained_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "training.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(recipe_ablation, "run_command", None)

    recipe_ablation.train("default", argparse.Namespace(runs=tmp_path))


def test_the_table_holds_every_arm_beside_the_default() -> None:
    arms = {"default; 1": 2.0, "default; 2": 4.0, "two layers; 1": 1.0}  # seconds of 10 tokens
    records = [
        {
            "decoding": "greedy",
            "set": "held_out",
            "repeat": 0,
            "num_tokens": 10,
            "arm": arm,
            "prompt": prompt,
            "seconds": seconds,
        }
        for arm, seconds in {"target": 9.0, **arms}.items()
        for prompt in ("a", "b")
    ]
    found = recipe_ablation.beside_default(records, "default; 1")
    row = {"acceptance_length_pooled": 2.5, "acceptance_length_pooled_interval": [2.0, 3.0]}
    result = {
        "provenance": provenance(seed=0, nodes=12),
        "trained": [
            {"name": name, "num_steps": 750, "num_examples": 8192, "seed": 42, "accuracy": shares}
            for name, shares in (("default", [0.5, 0.25]), ("two layers", [0.625]))
        ],
        "rows": [{"decoding": "greedy", "arm": arm, **row} for arm in arms],
        "beside": found,
    }

    text = table_of(result, "recipe_ablation.json")

    assert {row["arm"]: row["ratio"] for row in found} == {"default; 1": 1.0, "default; 2": 0.5, "two layers; 1": 2.0}
    assert "750 steps each on the same 8192 conversations" in text
    assert "Grown trees of 12\nnodes, not tuned, in so many passes, on 2 held-out prompts" in text
    assert "| two layers | 1 | 0.62 | 2.50 (2.00 to 3.00) | 2.00 (2.00 to 2.00) |" in text
