"""What counts cost at measured prices: steps between measured sizes, passes by the bytes that they read, and nothing for the host."""

import json
from typing import Any

import pytest

from benchmarks.inflation import SHAPES
from benchmarks.prices import FILE, Price, nodes_read, pass_bytes
from tests.drafters.dflash.makers import from_stock
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import prompt_lookup, stock_dflash, with_drafter

PRICE = Price("some", "some machine", "7b", "bfloat16", {1: 1.0, 16: 2.0, 64: 5.0}, bytes_per_second=100.0)
SMALL: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 256}


def _run(steps: int, drafted: int, accepted: int, passes: int) -> dict[str, Any]:
    counts = {"num_steps": steps, "num_drafted": drafted, "num_accepted": accepted, "num_passes": passes}
    return {"num_tokens": 99, "seconds": 99.0, "speculation": counts}


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1.0), (8.5, 1.5), (16, 2.0), (40, 3.5), (64, 5.0), (70, 5.375)])
def test_a_read_costs_what_lies_on_the_line_between_measured_sizes_and_little_beyond(
    nodes: float, seconds: float
) -> None:
    assert PRICE.read_seconds(nodes) == pytest.approx(seconds)


@pytest.mark.parametrize("nodes", [0.5, 71])
def test_sizes_beyond_those_measured_are_refused(nodes: float) -> None:
    assert not PRICE.can_read(nodes)
    with pytest.raises(OptionError, match=r"measured at 1 to 64 nodes, but .* are asked for"):
        PRICE.read_seconds(nodes)


def test_a_text_costs_its_steps_and_its_passes() -> None:
    run = PRICE.of_run(_run(steps=4, drafted=60, accepted=6, passes=8), num_bytes=50)

    assert run["num_tokens"] == 10  # a token of its own for each step; the prefill's is left out
    assert run["seconds"] == pytest.approx(4 * PRICE.read_seconds(16) + 8 * 0.5)


def test_the_nodes_of_a_step_count_its_root() -> None:
    assert nodes_read([_run(2, 10, 0, 0), _run(3, 0, 0, 0)]) == 3.0
    assert nodes_read([_run(0, 0, 0, 0)]) == 1.0


def test_every_price_of_the_file_says_what_was_measured_and_where() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))

    for name, row in stored.items():
        price = Price.named(name)
        assert price.shape in SHAPES
        assert row["measured"]
        assert row["source"]
        assert price.read_seconds(1) == pytest.approx(row["milliseconds"]["1"] / 1000)
    with pytest.raises(OptionError, match=r"A price must be one of \['cpu-0.3b', 'gpu-7b'"):
        Price.named("gpu-8b")


def test_a_pass_reads_the_drafter_and_the_head_that_it_drafts_through() -> None:
    target = make_target(num_hidden_layers=4, intermediate_size=704, vocab_size=96, **SMALL)
    falcon = with_drafter("falcon", make_drafter(target))
    dflash = stock_dflash("dflash", peaked_dflash(target))
    shape, head = SHAPES["0.3b"], 2 * SHAPES["0.3b"].vocab_size * SHAPES["0.3b"].hidden_size

    layer = 2 * shape.hidden_size * (2 * shape.num_attention_heads * shape.head_dim + 3 * shape.intermediate_size)
    for method in (falcon, dflash):
        found = pass_bytes(method, target, "0.3b", "bfloat16")
        assert found == 2 * pass_bytes(method, target, "0.3b", "float32") // 4
        assert found > head + layer


def test_a_pass_of_dflash_is_the_same_in_both_loops() -> None:
    target = make_target(num_hidden_layers=4, intermediate_size=704, vocab_size=96, **SMALL)
    stock = peaked_dflash(target)
    ours = with_drafter("trees", from_stock(stock, target))
    shape = ("0.3b", "bfloat16")

    assert pass_bytes(ours, target, *shape) == pass_bytes(stock_dflash("dflash", stock), target, *shape) > 0


def test_what_drafts_on_the_host_has_no_pass() -> None:
    target = make_target()

    assert pass_bytes(prompt_lookup("lookup"), target, "0.3b", "bfloat16") == 0
    assert pass_bytes(with_drafter("n-grams", LookaheadDrafter.from_target(target)), target, "0.3b", "bfloat16") == 0
