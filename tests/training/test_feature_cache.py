"""Features on disk equal those read from the target, are extracted once, and are refused for other data or targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.chat import make_rows, save_target, write_rows
from tests.tiny import make_target
from tests.training.killing import kill_in_write
from tests.training.runs import SMALL, loss_curve, make_dataset, make_trainer, same
from transformers_falcon_spec import cli
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training import features as feature_cache
from transformers_falcon_spec.training.features import FeatureCache, TargetFeatures

pytestmark = pytest.mark.training

NUM_ROWS = 20


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_SIZE", 8)


def make_cache(
    folder: Path, num_rows: int = NUM_ROWS, layers: tuple[int, ...] = (-1,), seed: int = 0, **config: Any
) -> FeatureCache:
    target = make_target(seed=seed, **SMALL, **config)
    return FeatureCache(make_dataset(num_rows), TargetFeatures(target, layers, 2), folder)


@pytest.mark.parametrize("layers", [(-1,), (1, -1)])
@torch.no_grad()
def test_each_example_brings_the_features_that_the_target_has_of_it_alone(
    tmp_path: Path, layers: tuple[int, ...]
) -> None:
    cache, target = make_cache(tmp_path, layers=layers), make_target(**SMALL)

    for index in (0, 7, 8, 13, NUM_ROWS - 1, -1):
        ids = torch.tensor(make_dataset(NUM_ROWS)[index]["input_ids"])[None]
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
        found = cache[index]
        torch.testing.assert_close(found["features"], torch.cat([states[layer][0] for layer in layers], dim=-1))
        torch.testing.assert_close(found.get("head_inputs", found["features"]), states[-1][0])


def test_a_loop_over_the_rows_ends_with_the_last_one(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, num_rows=3)

    assert [len(row["input_ids"]) for row, _ in zip(cache, range(9), strict=False)] == cache.lengths


def test_training_from_the_cache_sees_the_numbers_of_training_without(tmp_path: Path) -> None:
    without = make_trainer(tmp_path / "without", logging_steps=1)
    without.train()
    cached = make_trainer(tmp_path / "cached", train_dataset=make_cache(tmp_path / "shards"), logging_steps=1)
    cached.features.target.get_decoder().forward = None  # nobody may run the target
    cached.train()

    losses = [loss_curve(trainer) for trainer in (without, cached)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_rows_of_like_length_are_found_without_reading_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache(tmp_path / "shards")
    trainer = make_trainer(tmp_path, train_dataset=data)
    monkeypatch.setattr(FeatureCache, "__getitem__", lambda *_: pytest.fail("A row was read."))

    order = list(trainer._get_train_sampler())

    assert sorted(order) == list(range(len(data)))
    first = order[: trainer.args.train_batch_size]
    assert max(data.lengths) in [data.lengths[index] for index in first]  # the longest batch comes first


def test_an_interrupted_extraction_makes_the_missing_shards_only(tmp_path: Path) -> None:
    make_cache(tmp_path)
    shards = sorted(tmp_path.iterdir())
    assert len(shards) == 3
    before = shards[1].read_bytes()
    shards[1].unlink()
    times = [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])]

    make_cache(tmp_path)

    assert sorted(tmp_path.iterdir()) == shards
    assert shards[1].read_bytes() == before
    assert [shard.stat().st_mtime_ns for shard in (shards[0], shards[2])] == times


@pytest.mark.parametrize("change", [{"seed": 1}, {"rms_norm_eps": 0.1}, {"num_rows": 19}, {"layers": (1,)}])
def test_features_of_another_target_or_other_data_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    make_cache(tmp_path)

    with pytest.raises(TrainingError, match="must hold features of this target and data"):
        make_cache(tmp_path, **change)


KILLED_IN_SHARD = """
import sys
from transformers_falcon_spec import cli
from transformers_falcon_spec.training import features as feature_cache

feature_cache.SHARD_SIZE = 8
save = feature_cache.save_file
def killed(tensors, path, **options):
    if "00001" in path.name:
        stand_still_at(int(sys.argv[-1]))
    save(tensors, path, **options)
feature_cache.save_file = killed
sys.exit(cli.main(sys.argv[1:-1]))
"""


def test_killed_in_the_middle_of_a_shard_a_run_goes_on_to_the_features_and_weights_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    target = save_target(tmp_path / "target", **SMALL)
    data = write_rows(tmp_path / "data.jsonl", make_rows(NUM_ROWS))
    options = ["--max_steps", "2", "--use_cpu", "--report_to", "none", "--save_strategy", "no", "--max_length", "64"]
    command = ["train", "--target", str(target), "--data", str(data), *options]
    runs = {
        name: [*command, "--output_dir", str(tmp_path / name), "--cache_features", str(tmp_path / name / "features")]
        for name in ("whole", "killed")
    }
    assert cli.main(runs["whole"]) == 0
    whole, folder = (tmp_path / name / "features" for name in runs)
    limit = (whole / "features-00001.safetensors").stat().st_size // 2

    torn = kill_in_write(KILLED_IN_SHARD, runs["killed"], folder / ".tmp*", limit, 0)

    first = folder / "features-00000.safetensors"
    assert sorted(folder.iterdir()) == [torn, first]
    time = first.stat().st_mtime_ns
    assert cli.main(runs["killed"]) == 0

    assert first.stat().st_mtime_ns == time
    for shard in whole.iterdir():
        assert (folder / shard.name).read_bytes() == shard.read_bytes()
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in runs))
