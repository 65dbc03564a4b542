"""Computed tokens a second: variants by kind of drafter, passes chosen on held-out runs, best sizes, standings and tables."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.entrants import Entrant
from benchmarks.gpu_prices import (
    REPORT,
    TOKEN_PASSES,
    Variant,
    best_variants,
    check_readings,
    computed,
    described,
    grown,
    in_our_loop,
    passes_of,
    static,
    variants_of,
)
from benchmarks.prices import Price
from tests.drafters.dflash.makers import from_stock
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import (
    EagleDrafter,
    LayerParallelDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    SpeculationConfig,
)
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import Method, prompt_lookup, stock_dflash, with_drafter
from transformers_falcon_spec.provenance import provenance

PRICE = Price("gpu", "a GPU", "7b", "bfloat16", {1: 1.0, 16: 1.0, 64: 2.0}, bytes_per_second=1.0)
NUM_BYTES = {"ours": 1, "theirs": 2, "lookup": 0}


def _run(method: str, decoding: str, prompt: int, counts: Sequence[int]) -> dict[str, Any]:
    names = ("num_steps", "num_drafted", "num_accepted", "num_passes")
    row = {"method": method, "decoding": decoding, "set": "gsm8k", "prompt": str(prompt), "num_tokens": 9}
    return {**row, "speculation": dict(zip(names, counts, strict=True))}


def _variants() -> list[Variant]:
    sizes = [("ours", 16, 1), ("ours", 16, 2), ("ours", 64, 2), ("theirs", 16, 4)]
    found = [
        Variant(who, Method(f"{who}, {size} nodes, {passes} passes", "drafter"), size, passes)
        for who, size, passes in sizes
    ]
    return [*found, Variant("lookup", prompt_lookup("lookup"))]


COUNTS = {  # steps, nodes drafted, accepted, passes
    "ours, 16 nodes, 1 passes": (10, 150, 30, 10),  # 40 tokens in 20 seconds
    "ours, 16 nodes, 2 passes": (10, 150, 40, 20),  # 50 in 30
    "ours, 64 nodes, 2 passes": (10, 630, 70, 20),  # 80 in 40
    "theirs, 16 nodes, 4 passes": (10, 150, 50, 40),  # 60 in 90
    "lookup": (10, 0, 5, 0),  # 15 in 10
}


def _runs(decodings: Sequence[str] = ("greedy",)) -> list[dict[str, Any]]:
    return [
        _run(name, each, prompt, counts) for each in decodings for name, counts in COUNTS.items() for prompt in (0, 1)
    ]


def test_sizes_and_passes_are_those_with_the_most_tokens_a_second_at_a_price() -> None:
    cheap = replace(PRICE, seconds={1: 1.0, 16: 1.0, 64: 1.0})
    short = replace(PRICE, seconds={1: 1.0, 16: 1.0})

    found = {
        each: best_variants(_variants(), _runs(), price, NUM_BYTES)
        for each, price in [("cheap", cheap), ("short", short)]
    }

    names = {price: [each.method.name for each in chosen] for price, chosen in found.items()}
    rest = ["theirs, 16 nodes, 4 passes", "lookup"]
    assert names == {"cheap": ["ours, 64 nodes, 2 passes", *rest], "short": ["ours, 16 nodes, 1 passes", *rest]}


def test_a_price_that_knows_no_size_of_a_drafter_is_refused() -> None:
    shorter = replace(PRICE, seconds={1: 1.0, 8: 1.0})

    with pytest.raises(
        OptionError, match=r"within the 8 nodes of the price `gpu`, but all trees of \['ours', 'theirs'\]"
    ):
        best_variants(_variants(), _runs(), shorter, NUM_BYTES)


def test_what_was_chosen_is_held_against_the_best_rival() -> None:
    chosen = best_variants(_variants(), _runs(), PRICE, NUM_BYTES)

    found = computed(chosen, _runs(), PRICE, NUM_BYTES, ["ours"])

    rates = {row["variant"]: row["tokens_per_second"] for row in found["rows"]}
    assert rates == pytest.approx(
        {"ours, 16 nodes, 1 passes": 2.0, "theirs, 16 nodes, 4 passes": 60 / 90, "lookup": 1.5}
    )
    assert found["rows"][0]["times_plain"] == pytest.approx(2.0)
    pooled = found["standings"][0]
    assert (pooled["method"], pooled["other"], pooled["ahead"]) == ("ours", "lookup", "none")
    assert pooled["ratio"] == pytest.approx(2 / 1.5)


def test_a_size_is_left_out_if_one_text_alone_reads_more_than_a_price_knows() -> None:
    runs = _runs()
    text = next(run for run in runs if run["method"] == "ours, 64 nodes, 2 passes")
    text["speculation"]["num_drafted"] = 740  # 75 nodes a step, on average over both texts 69.5

    found = computed(_variants(), runs, PRICE, NUM_BYTES, ["ours"])

    assert {"ours, 64 nodes, 2 passes"} == set(COUNTS) - {row["variant"] for row in found["rows"]}


def test_the_tables_say_what_is_measured_and_what_computed() -> None:
    decodings = ("greedy", "temperature-0.7")
    runs = _runs(decodings)
    price = computed(_variants(), runs, PRICE, NUM_BYTES, ["ours"])
    trained = {"method": "ours", "num_steps": 10, "num_readings": 100, "num_examples": 40, "learning_rate": 4e-3}
    result = {
        "provenance": provenance(seed=0, limit=2, max_new_tokens=9),
        "trained": [{**trained, "start": None, "accuracy": 0.75}],
        "variants": [described(each, runs) for each in _variants()],
        "prices": [price, {**price, "title": "another GPU"}],
    }

    text = REPORT.render(result, "gpu_prices.json")

    assert "computed" in text.splitlines()[0]
    assert "| ours, 64 nodes, 2 passes | 8.00 tokens; 2/s (2 to 2), 2.00x | 8.00 tokens; 2/s (2 to 2), 2.00x |" in text
    assert "another GPU" not in text
    paper = REPORT.render(result, "paper.json")
    assert paper.startswith("### The paper's comparison, computed")
    assert "| ours | 10 | 100 | 0.004 | 0.750 |" in paper


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target(num_hidden_layers=4)


def test_drafters_that_grow_trees_take_every_size_and_number_of_passes(target: PreTrainedModel) -> None:
    falcon, eagle = (
        with_drafter("falcon", make_drafter(target)),
        with_drafter("eagle", EagleDrafter.from_target(target)),
    )

    blocks = variants_of(Entrant("falcon", ""), falcon, [16, 64])
    tokens = variants_of(Entrant("eagle", ""), eagle, [16])

    assert [(each.num_nodes, each.num_passes) for each in blocks] == [
        (size, passes) for size in (16, 64) for passes in (1, 2, 3, 4)
    ]
    assert [each.num_passes for each in tokens] == [*TOKEN_PASSES]
    options = blocks[1].method.assistant.generation_config  # type: ignore[union-attr]
    assert (options.tune, options.dynamic_tree, options.num_tree_nodes) == (False, True, 16)
    assert options.tree_depth == 2 * falcon.assistant.block_size  # type: ignore[union-attr]


def test_a_drafter_keeps_its_own_options_of_repeated_text(target: PreTrainedModel) -> None:
    drafter = make_drafter(target)
    drafter.generation_config = SpeculationConfig(prompt_lookup_num_tokens=5, num_tree_nodes=9)

    options = grown(drafter, 64, 2)
    fitted = static(drafter, torch.full((4, 4), 0.1), 8)

    assert (options.prompt_lookup_num_tokens, options.num_tree_nodes) == (5, 64)
    assert (fitted.prompt_lookup_num_tokens, fitted.dynamic_tree, len(fitted.draft_tree["parents"])) == (5, False, 8)
    assert drafter.generation_config.num_tree_nodes == 9


def test_medusa_takes_static_trees_fitted_to_its_held_out_ranks(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = MedusaDrafter.from_target(target)
    ranks = {f"eval_rank_{rank}_at_{head}": 0.5**rank / 2 for rank in range(10) for head in range(1, 9)}
    (tmp_path / "training.json").write_text(json.dumps({"curve": [{"step": 1, **ranks}]}), encoding="utf-8")

    found = variants_of(Entrant("medusa", str(tmp_path)), with_drafter("medusa", drafter), [16])

    assert [(each.num_nodes, each.num_passes) for each in found] == [(16, 1)]
    assert len(found[0].method.assistant.draft_tree) == 16  # type: ignore[union-attr]


def test_what_has_no_sizes_runs_untuned_as_it_comes(target: PreTrainedModel) -> None:
    lookahead = with_drafter("n-grams", LookaheadDrafter.from_target(target))
    dflash = stock_dflash("dflash", peaked_dflash(target))

    (host,) = variants_of(Entrant("n-grams", ""), lookahead, [16])
    (stock,) = variants_of(Entrant("dflash", ""), dflash, [16])
    trees = with_drafter("trees", from_stock(dflash.assistant, target))

    (one,) = variants_of(Entrant("dflash-tree", ""), trees, [16])
    assert (one.num_nodes, one.num_passes) == (16, 1)
    assert (host.num_nodes, host.method.assistant.generation_config.tune) == (None, False)  # type: ignore[union-attr]
    assert stock.method is dflash


def test_a_language_model_drafts_trees_in_our_loop(target: PreTrainedModel, tmp_path: Path) -> None:
    make_target(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    entry = Entrant("small", str(tmp_path / "small"))

    method = in_our_loop(entry, entry.load(target), target)

    assert isinstance(method.assistant, LayerParallelDrafter)
    assert method.name == "small"
    lookup = prompt_lookup("lookup")
    assert in_our_loop(entry, lookup, target) is lookup


def test_the_papers_comparison_is_of_drafters_that_read_equally_much() -> None:
    def trained(method: str, readings: int, start: str | None = None) -> dict[str, Any]:
        return {"method": method, "num_readings": readings, "start": start}

    both = ["falcon", "eagle1"]
    check_readings([trained("falcon", 111_961), trained("eagle1", 112_000)], both)
    check_readings([], [])

    for other in (trained("eagle1", 64_000), trained("eagle1", 111_961, "falcon")):
        with pytest.raises(OptionError, match=r"must be trained on equally many readings, but those are .*Train them"):
            check_readings([trained("falcon", 111_961), other], both)
    with pytest.raises(OptionError, match=r"without a `training.json` are \['eagle1'\]"):
        check_readings([trained("falcon", 111_961)], both)


def test_small_blocks_may_take_the_passes_that_reach_the_papers_depth(target: PreTrainedModel) -> None:
    assert [passes_of(make_drafter(target, block_size=size)) for size in (2, 3, 6)] == [
        (1, 2, 3, 4),
        (1, 2, 3),
        (1, 2, 3),
    ]
