"""Metrics, loaded and called as a user does."""

import contextlib
import io
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import blocks
from transformers_falcon_spec import GenerationStats
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import summarize, wilson_interval

ROOT = Path(__file__).parents[2]
METRICS = sorted(path.name for path in (ROOT / "examples" / "metrics").iterdir())
Load = Callable[[str], Any]


@pytest.fixture(scope="session")
def load_metric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """`evaluate.load` on the folder of a metric, with all that it stores in a folder of the test run."""
    import evaluate  # noqa: PLC0415  late: it must not precede the shape checks

    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        yield lambda name: evaluate.load(str(ROOT / "examples" / "metrics" / name), keep_in_memory=True)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_loads_without_a_network(load_metric: Load, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    assert load_metric(name).name.replace("_", "") == name.replace("_", "")  # made from the name of its class


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_nothing_is_refused(load_metric: Load, name: str) -> None:
    metric = load_metric(name)

    with pytest.raises(OptionError, match=r"at least one row, but there is none"):
        metric.compute(**{column: [] for column in metric.features})


def test_acceptance_is_pooled_over_texts(load_metric: Load) -> None:
    first, second = GenerationStats(), GenerationStats()
    for num_accepted in (0, 2, 3):
        first.record(num_nodes=5, max_depth=3, num_accepted=num_accepted)
    second.record(num_nodes=9, max_depth=3, num_accepted=1)
    columns = {
        name: [getattr(stats, name) for stats in (first, second)]
        for name in ("num_steps", "num_accepted", "num_drafted")
    }

    found = load_metric("acceptance").compute(**columns)

    assert found["acceptance_length"] == (first + second).acceptance_length == 1 + 6 / 4
    assert found["acceptance_rate"] == 6 / 20
    assert found["acceptance_length_interval"] == (2.0, 1 + 5 / 3)  # only the second, only the first text


@pytest.mark.parametrize("counts", [(-1, 0, 0), (1, 3, 2), (0, 0, 2), (1, None, 2)])
def test_counts_that_cannot_be_are_refused(load_metric: Load, counts: tuple[int | None, ...]) -> None:
    names = ("num_steps", "num_accepted", "num_drafted")

    with pytest.raises(
        OptionError, match=rf"row 1 has {counts[0]} steps, {counts[1]} accepted and {counts[2]} drafted"
    ):
        load_metric("acceptance").compute(**{name: [4, count] for name, count in zip(names, counts, strict=True)})


def test_the_speed_up_is_that_of_the_benchmark(load_metric: Load) -> None:
    seconds = {"target": [2.0, 3.0, 5.0], "drafter": [1.0, 2.5, 2.0]}
    stats = GenerationStats(num_steps=10, draft_seconds=0.1, verify_seconds=0.4, prefill_seconds=0.1)
    records = [
        {
            "target": "t",
            "method": method,
            "block_size": 2,
            "prefill_seconds": 0.1,
            "decoding": "greedy",
            "set": "sums",
            "prompt": str(i),
            "seconds": time,
        }
        | {"num_tokens": 20 + i, "token_ids": [i], "repetition_rate": 0.0, "speculation": vars(stats)}
        for method, times in seconds.items()
        for i, time in enumerate(times)
    ]
    (row,) = summarize(records, seed=7)

    found = load_metric("speedup").compute(
        num_tokens=[20, 21, 22],
        seconds=seconds["drafter"],
        baseline_num_tokens=[20, 21, 22],
        baseline_seconds=seconds["target"],
        seed=7,
    )

    assert found["speedup"] == pytest.approx(10 / 5.5)
    assert found == {name: row[name] for name in found}


@pytest.mark.parametrize("run", [(0, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf")), (5, None)])
def test_runs_without_tokens_or_time_are_refused(load_metric: Load, run: tuple[int, float | None]) -> None:
    with pytest.raises(OptionError, match=r"A run must have tokens and seconds, both positive, but row 1 has"):
        load_metric("speedup").compute(
            num_tokens=[5, 5], seconds=[1.0, 1.0], baseline_num_tokens=[5, run[0]], baseline_seconds=[1.0, run[1]]
        )


def test_parity_counts_equal_texts_and_shows_where_others_differ(load_metric: Load) -> None:
    found = load_metric("token_parity").compute(
        predictions=[[1, 2, 3], [1, 2], [9, 2, 3], [], [1, 2, 3, 4]],
        references=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [], [1, 2, 3]],
    )

    assert found == {
        "identical_share": 2 / 5,
        "identical_share_interval": wilson_interval(2, 5),
        "num_identical": 2,
        "num_texts": 5,
        "first_differences": [None, 2, 0, None, 3],
    }


@pytest.mark.parametrize("text", [None, [1, None]])
def test_a_missing_text_is_not_an_equal_one(load_metric: Load, text: Any) -> None:
    with pytest.raises(OptionError, match=r"some text or token is missing"):
        load_metric("token_parity").compute(predictions=[text], references=[text])


def test_the_page_prints_what_it_says(load_metric: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    shown = io.StringIO()

    with contextlib.redirect_stdout(shown):
        for block in blocks(page, "python"):
            exec(block, names)  # noqa: S102  code of this repository

    assert re.sub(r"\s+", " ", shown.getvalue()) == re.sub(r"\s+", " ", "\n".join(blocks(page, "text")))


@pytest.mark.parametrize("name", METRICS)
def test_the_page_has_a_section_for_every_metric(name: str) -> None:
    assert f"## `{name}`\n" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
