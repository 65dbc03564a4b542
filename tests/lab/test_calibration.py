"""The measured calibration: errors are those of the definition, of temperatures that were fitted to other prompts."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.calibration import (
    SeenLists,
    compare,
    error_by_luck,
    expected_calibration_error,
    fits_of_folds,
    fold_of,
    main,
    reliability,
)
from lab.report import calibration
from tests.chat import save_target
from tests.evaluation.test_calibration import HEATS, VOCAB, made_lists
from tests.tiny import make_drafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.calibration import UNCALIBRATED, ObservedText, fit


def seen_texts(num_prompts: int, num: int) -> list[ObservedText]:
    texts = []
    for number in range(num_prompts):
        for shift, (name, heat) in enumerate(HEATS.items()):
            seen = SeenLists.of(*made_lists(num, heat, 10 * number + shift), heat or 1.0)
            texts.append(ObservedText(f"prompt {number:02d}", name, heat, seen))
    return texts


def test_errors_are_those_of_a_fit_to_other_prompts() -> None:
    texts = seen_texts(10, 400)
    fits = fits_of_folds(texts, 2)
    folds = fold_of(texts)

    rows = compare(texts, fits, 2, seed=0)

    assert [row["decoding"] for row in rows] == list(HEATS)
    assert fits[0] == fit([text for text in texts if folds[text.prompt] == 1], 2)
    for row in rows:
        assert row["num_lists"] == 4000
        assert row["after"]["best_nodes"]["error"] < 2.5 * row["after"]["best_nodes"]["error_by_luck"]
    greedy = rows[0]
    assert greedy["before"]["best_nodes"]["error"] > 2 * greedy["after"]["best_nodes"]["error"]
    low, high = greedy["loss_saved_interval"]
    assert 0 < low < greedy["loss_saved"] < high


def naive_error(probs: list[float], is_kept: list[bool]) -> float:
    pairs = sorted(zip(probs, is_kept, strict=True), key=lambda pair: pair[0])
    size, total = math.ceil(len(pairs) / 15), 0.0
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        total += abs(sum(prob for prob, _ in part) - sum(kept for _, kept in part))
    return total / len(pairs)


@pytest.mark.parametrize("num", [7, 100, 1003])
def test_the_calibration_error_is_the_mean_distance_over_bins(num: int) -> None:
    draws = random.Random(num)
    probs, is_kept = [draws.random() for _ in range(num)], [draws.random() < 0.3 for _ in range(num)]

    bins = reliability(torch.tensor(probs), torch.tensor(is_kept))
    found = expected_calibration_error(bins)

    assert found == pytest.approx(naive_error(probs, is_kept), abs=1e-6)
    assert sum(each["num_nodes"] * abs(each["share"] - each["probability"]) for each in bins) / num == pytest.approx(
        found
    )
    assert all(each["interval"][0] <= each["share"] <= each["interval"][1] for each in bins)


def test_luck_alone_leaves_less_the_more_there_are() -> None:
    few, many = (error_by_luck(torch.linspace(0.1, 0.9, num), seed=0) for num in (150, 15000))

    assert 0 < many < few / 5


def test_what_was_seen_survives_json_with_the_best_tokens() -> None:
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    seen = SeenLists.of([1, 2, 3], scores, [4, -1, int(scores[2].argmax())], 0.7)

    again = SeenLists.from_json(seen.to_json())

    for name in ("depths", "ranks"):
        assert getattr(again, name).equal(getattr(seen, name))
    torch.testing.assert_close(again.losses, seen.losses, atol=1e-4, rtol=0)
    assert again.is_kept[1].any().item() is False
    assert again.is_kept[2].tolist() == [True] + [False] * 7
    steps = torch.full((3,), UNCALIBRATED)
    expected = (scores / 0.7).softmax(-1)
    torch.testing.assert_close(again.best_probs(steps), expected.topk(8).values, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A drafter that knows its target's own features, so that paths are kept, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = AutoModelForCausalLM.from_pretrained(save_target(folder / "target"))
    make_drafter(target, block_size=1).save_pretrained(folder / "drafter")
    prompts = folder / "sums.jsonl"
    words = ["one plus two", "three", "four minus one", "two times two"]
    rows = [json.dumps({"id": str(number), "prompt": text}) + "\n" for number, text in enumerate(words)]
    prompts.write_text("".join(rows), encoding="utf-8")
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return [*models, "--prompts", str(prompts), "--max_new_tokens", "24"]


def test_a_drafter_is_not_changed(pair: list[str], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="changes no drafter"):
        main([*pair, "--output", str(tmp_path / "calibration.json"), "--save"])


def test_the_table_shows_the_errors(pair: list[str], tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    main([*pair, "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))

    table = calibration(result, str(output))

    for row in result["rows"]:
        for side in ("before", "after"):
            error = f"{row[side]['best_nodes']['error']:.3f}"
            assert error in table
    assert result["provenance"]["commit"][:7] in table
