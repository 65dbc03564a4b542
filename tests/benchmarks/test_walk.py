"""What the walk is said to take follows from Qwen3-8B's sizes and the stated rates, and the commands are made for the embedded target."""

from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from benchmarks import walk as benchmark
from tests import walk

MODELS = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module")
def models() -> MODELS:
    return benchmark.meta_models()


def test_sizes_are_those_of_the_published_model(models: MODELS) -> None:
    found = [row["gigabytes"] for row in benchmark.sizes(*models, benchmark.Rates())]

    assert round(found[0], 1) == 16.4  # of its files on the Hub
    assert min(found) > 0.1


def test_hours_are_tokens_over_rates_and_fall_with_faster_machines(models: MODELS) -> None:
    rates = benchmark.Rates()
    slow, fast = (benchmark.hours(*models, replace(rates, peak_flops=factor * rates.peak_flops)) for factor in (1, 2))

    for row in slow[:-1]:
        assert row["hours"] == pytest.approx(row["tokens"] / row["rate"] / 3600)
    assert slow[-1]["hours"] == pytest.approx(sum(row["hours"] for row in slow[:-1]))
    assert fast[1]["hours"] < slow[1]["hours"]
    assert [fast[number] for number in (0, 2)] == [slow[number] for number in (0, 2)]


def test_arithmetic_is_that_of_the_layers_counted_by_hand(models: MODELS) -> None:
    rates = replace(benchmark.Rates(), answer_tokens_per_row=0)
    attention = 4096 * (2 * 32 * 128 + 2 * 8 * 128)
    layers = 36 * (attention + 3 * 4096 * 12288)
    trained = sum(weight.numel() for weight in models[1].parameters() if weight.requires_grad)

    assert benchmark.flops_per_token(*models, rates) == pytest.approx(2 * layers + 6 * trained, rel=1e-3)


def test_commands_for_the_embedded_target_name_no_switch() -> None:
    cells = list(map(benchmark.without_switch, walk.cells()))

    assert not any("enable_thinking" in cell for cell in cells[1:] if cell.startswith(walk.BASH))
    assert sum(cell.count("falcon-spec ") for cell in cells) == sum(
        cell.count("falcon-spec ") for cell in walk.cells()
    )
