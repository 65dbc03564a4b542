"""Features on disk: the numbers that training without a cache sees, made once, and refused where they do not fit."""

from pathlib import Path

import pytest
import torch

from tests.tiny import make_target
from tests.training.runs import SMALL, make_dataset, make_trainer
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training import feature_cache
from transformers_falcon_spec.training.feature_cache import FeatureCache
from transformers_falcon_spec.training.features import TargetFeatures

NUM_ROWS = 20


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_SIZE", 8)


def make_cache(folder: Path, num_rows: int = NUM_ROWS, layers: tuple[int, ...] = (-1,), seed: int = 0) -> FeatureCache:
    target = make_target(seed=seed, **SMALL)
    return FeatureCache(make_dataset(num_rows), TargetFeatures(target, layers, 2), folder)


@pytest.mark.parametrize("layers", [(-1,), (1, -1)])
@torch.no_grad()
def test_each_example_brings_what_the_target_says_of_it_alone(tmp_path: Path, layers: tuple[int, ...]) -> None:
    cache, target = make_cache(tmp_path, layers=layers), make_target(**SMALL)

    for index in (0, 7, 8, 13, NUM_ROWS - 1, -1):
        ids = torch.tensor(make_dataset(NUM_ROWS)[index]["input_ids"])[None]
        states = target(input_ids=ids, output_hidden_states=True).hidden_states
        found = cache[index]
        torch.testing.assert_close(found["features"], torch.cat([states[layer][0] for layer in layers], dim=-1))
        torch.testing.assert_close(found.get("head_inputs", found["features"]), states[-1][0])


def test_training_from_the_cache_sees_the_numbers_of_training_without(tmp_path: Path) -> None:
    without = make_trainer(tmp_path / "without", logging_steps=1)
    without.train()
    cached = make_trainer(tmp_path / "cached", train_dataset=make_cache(tmp_path / "shards"), logging_steps=1)
    cached.features.target.get_decoder().forward = None  # nobody may run the target
    cached.train()

    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (without, cached)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


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


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_rows": 19}, {"layers": (1,)}])
def test_features_of_another_target_or_other_data_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    make_cache(tmp_path)

    with pytest.raises(TrainingError, match="must hold features of this target and data"):
        make_cache(tmp_path, **change)


def test_a_shard_cut_short_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path)
    shard = tmp_path / "features-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])

    with pytest.raises(TrainingError, match="must be a whole shard"):
        make_cache(tmp_path)


def test_too_little_room_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))

    with pytest.raises(TrainingError, match="must have room for"):
        make_cache(tmp_path)

    assert not list(tmp_path.iterdir())
