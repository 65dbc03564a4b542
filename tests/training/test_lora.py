"""LoRA on a drafter: only the adapter learns, runs resume exactly, and the target may have an adapter, too."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests import runs
from tests.adapters import KINDS, adapted, saved_drafter, switch_off
from tests.tiny import make_drafter, make_target
from tests.training.runs import SMALL, example_batch, make_dataset, make_trainer, same, weights
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.commands.loading import load_trainable
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.provenance import weights_fingerprint
from transformers_falcon_spec.training.features import FeatureCache, TargetFeatures
from transformers_falcon_spec.training.lora import save_adapter, with_lora
from transformers_falcon_spec.training.options import LoraOptions

pytestmark = pytest.mark.training

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of every kind on disk."""
    folder = tmp_path_factory.mktemp("drafters")
    return {kind: saved_drafter(kind, folder / str(number), **SMALL) for number, kind in enumerate(KINDS)}


def make_lora_trainer(folder: Path, base: Path, lora: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer of an adapter for the drafter in `base`."""
    options = {"ttt_steps": 2, **options}
    return make_trainer(
        folder,
        make=lambda target: with_lora(load_trainable(str(base), target), LoraOptions(**{**LORA, **(lora or {})})),
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_alone_learns(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_lora_trainer(tmp_path, folders[kind], max_steps=20)
    start, before = weights(trainer), trainer.evaluate()

    trainer.train()

    changed = {name for name, value in weights(trainer).items() if not value.equal(start[name])}
    assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
    assert changed == {name for name in start if ".lora_" in name}
    linear = [name for name, part in trainer.drafter.named_modules() if name.endswith("base_layer")]
    assert len(changed) == 2 * len(linear) > 0


@pytest.mark.parametrize("kind", ["falcon", "falcon, as shipped"])
def test_modules_besides_the_adapter_learn_in_full(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_lora_trainer(tmp_path, folders[kind], {"lora_modules_to_save": ["recurrence"]})
    start = weights(trainer)

    trainer.train()

    copies = {name for name in start if ".modules_to_save." in name}
    changed = {name for name, value in weights(trainer).items() if not value.equal(start[name])}
    assert changed == {name for name in start if ".lora_" in name} | copies
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert len(trained) == len(changed)


@pytest.mark.parametrize("parts", [[], ["recurrence"]])
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_adapter(
    parts: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    base, lora = folders["falcon, as shipped"], {"lora_modules_to_save": parts}
    whole = make_lora_trainer(tmp_path / "whole", base, lora, max_steps=6, save_strategy="steps", save_steps=2)
    whole.train()

    resumed = make_lora_trainer(tmp_path / "resumed", base, lora, max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    assert same(weights(whole), weights(resumed))
    trained = [
        [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
        for trainer in (whole, resumed)
    ]
    assert trained[0] == trained[1]
    files = {path.name for path in (tmp_path / "whole" / "checkpoint-2").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < files
    assert "model.safetensors" not in files


def test_training_further_takes_no_options_of_fresh_drafters(folders: dict[str, Path]) -> None:
    untrained = {
        kind: [
            name
            for name, weight in load_trainable(str(folder), make_target(**SMALL)).named_parameters()
            if not weight.requires_grad
        ]
        for kind, folder in folders.items()
    }

    assert not any(untrained.values())


def test_an_adapter_learns_with_recomputed_activations(folders: dict[str, Path], tmp_path: Path) -> None:
    found = []

    for options in ({}, {"gradient_checkpointing": True}):
        trainer = make_lora_trainer(tmp_path, folders["falcon"], max_steps=3, **options)
        trainer.train()
        found.append(weights(trainer))

    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_a_fresh_adapter_changes_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    losses = [
        trainer.evaluate()["eval_loss"]
        for trainer in (
            make_lora_trainer(tmp_path, folders["falcon"]),
            make_trainer(tmp_path, make=lambda target: load_trainable(str(folders["falcon"]), target)),
        )
    ]

    assert losses[0] == losses[1]


@pytest.mark.parametrize("with_tree", [False, True])
def test_the_adapter_is_saved_alone_with_its_tree_if_it_has_one(
    with_tree: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = make_lora_trainer(tmp_path, folders["falcon"], draft_tree_nodes=5)
    trainer.train()
    tree = trainer.fit_draft_tree()

    save_adapter(trainer.model, tmp_path / "adapter", with_tree)

    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    loaded = FalconSpecDrafter.from_pretrained(tmp_path / "adapter")
    assert {value.dtype for value in stored.values()} == {torch.float32}
    assert (loaded.draft_tree.to_json() == tree.to_json()) == with_tree
    assert (loaded.sliding_window == trainer.drafter.sliding_window == trainer.trained_length) == with_tree
    assert (tmp_path / "adapter" / "generation_config.json").is_file() == with_tree
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


def test_a_tree_in_the_options_is_the_one_that_is_fitted_anew(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, make=lambda target: load_trainable(str(folders["falcon"]), target), draft_tree_nodes=5
    )
    trainer.drafter.generation_config.draft_tree = {"parents": [-1, 0], "ranks": [-1, 0]}

    tree = trainer.fit_draft_tree()

    assert trainer.drafter.draft_tree.to_json() == tree.to_json()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_r": 0, "use_peft": True}, "`lora_r` must be at least 1, but it is 0"),
        ({"lora_alpha": 0, "use_peft": True}, "`lora_alpha` must be at least 1, but it is 0"),
        (
            {"lora_r": 8, "lora_modules_to_save": ["x"]},
            "`--lora_r`, `--lora_modules_to_save` must come with `--use_peft`",
        ),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        LoraOptions(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"lora_target_modules": ["nowhere"]},
            "`lora_target_modules` must name linear layers of a `FalconSpecDrafter`",
        ),
        ({"lora_target_modules": ["recurrence"]}, "`lora_target_modules` must name linear layers"),
        ({"lora_modules_to_save": ["lstm"]}, r"must name parts of a `FalconSpecDrafter`, such as \['recurrence'"),
    ],
)
def test_parts_that_are_not_there_or_take_no_adapter_are_refused(
    options: dict[str, Any], text: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(OptionError, match=text):
        with_lora(load_trainable(str(folders["falcon"]), make_target(**SMALL)), LoraOptions(**{**LORA, **options}))


def test_a_drafter_that_was_never_saved_is_refused() -> None:
    with pytest.raises(OptionError, match="this one was never saved"):
        with_lora(KINDS["falcon"](make_target()), LoraOptions(**LORA))


def make_adapted_target(**options: Any) -> peft.PeftModel:
    return adapted(make_target(**SMALL), target_modules=["q_proj", "v_proj", "up_proj"], **options)


def features_of(target: Any) -> torch.Tensor:
    batch = example_batch()
    return TargetFeatures(target, (1, -1), 2).read(batch["input_ids"], batch["attention_mask"])["features"]


def test_features_are_read_with_the_adapter_that_is_active() -> None:
    target = make_adapted_target()

    found = features_of(target)

    with target.disable_adapter():
        without = features_of(target)
    assert without.equal(features_of(make_target(**SMALL)))
    assert not torch.allclose(found, without)
    torch.testing.assert_close(found, features_of(target.merge_and_unload()))


def test_a_drafter_learns_from_a_target_with_an_adapter_and_drafts_for_it(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        max_steps=20,
        make=lambda target, **_: make_drafter(target.get_base_model()),
        make_target_of_run=make_adapted_target,
    )
    before = trainer.evaluate()["eval_loss"]

    trainer.train()

    assert trainer.evaluate()["eval_loss"] < before
    target = trainer.features.target.double()
    runs.both(target, trainer.model.eval().double()).assert_equal(is_kept=False)


def second_adapter() -> peft.PeftModel:
    target = make_adapted_target()
    target.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    target.set_adapter("second")
    return target


def scaled_adapter() -> peft.PeftModel:
    target = make_adapted_target()
    for part in target.modules():
        if isinstance(part, peft.tuners.lora.LoraLayer):
            part.scale_layer(2.0)
    return target


def disabled_adapter() -> peft.PeftModel:
    target = make_adapted_target()
    target.base_model.disable_adapter_layers()
    return target


OTHERS = {
    "no adapter": lambda: make_target(**SMALL),
    "another adapter": lambda: make_adapted_target(seed=1),
    "a second adapter": second_adapter,
    "counted twice": scaled_adapter,
    "switched off": disabled_adapter,
    "merged": lambda: make_adapted_target().merge_and_unload(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_features_of_another_adapter_are_refused(name: str, tmp_path: Path) -> None:
    data = make_dataset(4)
    FeatureCache(data, TargetFeatures(make_adapted_target(), (-1,), 2), tmp_path)
    FeatureCache(data, TargetFeatures(make_adapted_target(), (-1,), 2), tmp_path)  # the same once more

    with pytest.raises(TrainingError, match="must hold features of this target and data"):
        FeatureCache(data, TargetFeatures(OTHERS[name](), (-1,), 2), tmp_path)


def test_an_adapter_that_is_loaded_into_the_target_counts_like_a_wrapped_one(tmp_path: Path) -> None:
    make_adapted_target().save_pretrained(tmp_path)
    bare, target = make_target(**SMALL), make_target(**SMALL)
    target.load_adapter(str(tmp_path))

    assert features_of(target).allclose(features_of(make_adapted_target()), atol=1e-6)
    assert weights_fingerprint(target) != weights_fingerprint(bare)
    on = weights_fingerprint(target)
    switch_off(target)
    assert weights_fingerprint(target) != on


def test_the_drafter_inside_is_what_the_objective_knows(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = make_lora_trainer(tmp_path, folders["medusa"])

    assert isinstance(trainer.drafter, DrafterModel)
    assert trainer.model.get_base_model() is trainer.drafter
