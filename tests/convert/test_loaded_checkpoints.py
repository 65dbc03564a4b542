"""`load_drafter`: whatever lies under a name drafts for the target, or is refused in words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter, load_drafter
from transformers_falcon_spec.commands.loading import load_method
from transformers_falcon_spec.convert import conversion
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, OptionError

from . import foreign
from .refusals import MAKERS

CLASSES = {"falcon": FalconSpecDrafter, "eagle": EagleDrafter, "medusa": MedusaDrafter}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def eagle3(folder: Path, seed: int = 0, **fields: Any) -> str:
    """The folder of an Eagle-3 drafter as published."""
    config, weights = foreign.eagle3(eagle_aux_hidden_state_layer_ids=foreign.LAYER_IDS, **fields)
    weights["fc.weight"] += seed
    return str(foreign.written(folder, config, weights))


def first_weight(drafter: Any) -> Tensor:
    return next(iter(drafter.parameters()))


@pytest.mark.parametrize("name", ["falcon", "eagle", "eagle3", "speculators", "medusa", "medusa v2"])
def test_a_checkpoint_of_other_software_becomes_a_drafter_where_the_target_is(name: str, tmp_path: Path) -> None:
    target = make_target("llama").double()

    drafter = load_drafter(foreign.written(tmp_path / "source", *MAKERS[name]()), target)

    kind = "eagle" if name == "speculators" else name.rstrip("23 v")
    assert isinstance(drafter, CLASSES[kind])
    assert (drafter.dtype, drafter.device, drafter.training) == (torch.float64, target.device, False)


def test_the_text_with_a_published_drafter_is_that_of_the_target(tmp_path: Path) -> None:
    target = make_target("llama").double()
    drafter = load_drafter(eagle3(tmp_path / "source"), target)
    plain = target.generate(make_prompt(), max_new_tokens=12, do_sample=False)

    out = target.generate(
        make_prompt(), assistant_model=drafter, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )

    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.num_drafted > 0


def test_a_checkpoint_is_converted_once_for_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    convert = conversion.convert_checkpoint
    monkeypatch.setattr(
        conversion, "convert_checkpoint", lambda source, *rest: (sources.append(source), convert(source, *rest))[1]
    )
    target, source = make_target("llama"), eagle3(tmp_path / "source")

    first, again = load_drafter(source, target), load_drafter(source, target.bfloat16())
    other = load_drafter(eagle3(tmp_path / "source", seed=1), target.float())
    load_drafter(source, make_target("llama", eos_token_id=9))

    assert sources == [source] * 3  # the first, other weights, another target
    assert again.dtype == torch.bfloat16
    assert first_weight(again).equal(first_weight(first).bfloat16())
    assert not first_weight(other).equal(first_weight(first))


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa"])
def test_a_benchmark_drafts_with_it_and_not_with_a_language_model_of_new_weights(name: str, tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *MAKERS[name]())

    method = load_method(str(source), make_target("llama"))

    assert method.kind == "drafter"
    assert isinstance(method.assistant, CLASSES[name.rstrip("3")])


def test_a_drafter_of_this_package_is_loaded_as_it_is(tmp_path: Path, cache: Path) -> None:
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path / "drafter")

    drafter = load_drafter(tmp_path / "drafter", target.bfloat16())

    assert (type(drafter), drafter.dtype) == (FalconSpecDrafter, torch.bfloat16)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c", "~/x"])
def test_what_can_be_no_name_on_the_hub_is_refused_without_asking_it(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(conversion, "kind_of", None)  # must not be called

    with pytest.raises(CheckpointError, match=f"`OWNER/NAME` on the Hub, but `{name}` is no folder that is there"):
        load_drafter(name, make_target())


def test_a_file_and_a_name_that_the_hub_does_not_give_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CheckpointError, match="is a file"):
        load_drafter(tmp_path / "file", make_target())
    with pytest.raises(CheckpointError, match="`someone/nothing` must be a folder with a drafter, or the name of one"):
        load_drafter("someone/nothing", make_target())


def test_an_unknown_checkpoint_is_described_by_names_and_shapes_and_never_by_values(tmp_path: Path) -> None:
    weights = {"body.weight": torch.full((2, 3), 0.625)}
    source = foreign.written(tmp_path / "source", {"new_field": 1}, weights)

    with pytest.raises(CheckpointError, match=r"\['new_field'\].*\{'body.weight': \(2, 3\)\}") as caught:
        load_drafter(source, make_target())

    assert "0.625" not in str(caught.value)
    assert "tensor" not in str(caught.value)


def test_what_a_config_refuses_is_refused_before_weights_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "llada").mkdir()
    (tmp_path / "llada" / "config.json").write_text('{"model_type": "llada"}', encoding="utf-8")

    with pytest.raises(CheckpointError, match="This is LLaDA"):
        load_drafter(tmp_path / "llada", make_target())


def test_a_language_model_is_told_how_it_drafts(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "model")

    with pytest.raises(CheckpointError, match=r"This is a language model .*LayerParallelDrafter.from_pretrained"):
        load_drafter(tmp_path / "model", make_target())


def test_a_name_or_a_drafter_in_the_place_of_the_target_is_refused() -> None:
    name: Any = "models/reference-target"

    with pytest.raises(OptionError, match=r"that is loaded, but it is the name 'models/reference-target'\. Load it"):
        load_drafter("models/falcon-reference", name)
    with pytest.raises(OptionError, match=r"that is loaded, but it is a `FalconSpecDrafter`\. Load it"):
        load_drafter(name, make_drafter(make_target()))


def test_a_drafter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    narrow = make_target("llama", hidden_size=32)
    make_drafter(narrow, target_name_or_path="x/right").save_pretrained(tmp_path / "drafter")

    with pytest.raises(DrafterMismatchError, match="Load the target it was trained for: `x/right`"):
        load_drafter(tmp_path / "drafter", make_target("llama"))
    with pytest.raises(DrafterMismatchError, match=r"expects features of size 64, but the target .* gives 32"):
        load_drafter(eagle3(tmp_path / "source"), narrow)
