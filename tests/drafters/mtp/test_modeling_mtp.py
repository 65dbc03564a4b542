"""Making an MTP drafter: what it takes of the target and leaves alone there, and targets that have nothing to take."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.mtp.makers import loaded, saved
from tests.tiny import make_target
from transformers_falcon_spec import MtpDrafter
from transformers_falcon_spec.convert import export_drafter
from transformers_falcon_spec.errors import CheckpointError, OptionError


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return loaded(saved(tmp_path / "target", "mellum"))


def test_its_weights_are_those_of_the_checkpoint_and_nothing_else(target: Any) -> None:
    drafter = MtpDrafter.from_target(target)

    stored = load_file(Path(target.config._name_or_path) / "model.safetensors")
    mine = {key: value for key, value in stored.items() if key.startswith("mtp.")}
    assert drafter.layer.eh_proj.weight.equal(mine["mtp.fc.weight"].double())
    assert drafter.num_parameters() == sum(value.numel() for value in mine.values())
    assert (drafter.dtype, drafter.device, drafter.training) == (torch.float64, target.device, False)


def test_moving_the_drafter_leaves_the_target_as_it_is(target: Any) -> None:
    before = {name: buffer.clone() for name, buffer in target.named_buffers()}

    MtpDrafter.from_target(target).to(torch.bfloat16)

    assert before
    assert all(buffer.equal(before[name]) for name, buffer in target.named_buffers())
    assert target.config._attn_implementation == "sdpa"


def test_a_target_that_attends_eagerly_keeps_that(target: Any) -> None:
    target.set_attn_implementation("eager")

    drafter = MtpDrafter.from_target(target)

    assert target.config._attn_implementation == "eager"
    assert drafter.layer.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {}, "must carry one MTP layer to draft with, but `LlamaForCausalLM` has 0 .* Take another kind"),
        ("glm4_moe", {"num_mtp_layers": 2}, r"has 2 \(`num_mtp_layers` of its config\)\. Stock `generate"),
    ],
)
def test_a_target_without_one_layer_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MtpDrafter.from_target(make_target(family, **changes))


def test_a_layer_that_attends_in_another_way_is_refused(target: Any) -> None:
    target.config.mtp_layer_types = ["chunked_attention"]

    with pytest.raises(OptionError, match=r"is of another kind \(`chunked_attention`\)"):
        MtpDrafter.from_target(target)


def test_a_quantised_checkpoint_is_refused(target: Any) -> None:
    target.hf_quantizer = SimpleNamespace(pre_quantized=True)

    with pytest.raises(OptionError, match="is quantised, and Transformers loads the layer without its scales"):
        MtpDrafter.from_target(target)


def test_a_checkpoint_without_the_layers_weights_is_refused(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")

    with pytest.raises(CheckpointError, match=r"must hold the weights of its MTP layer.*leaves that layer out"):
        MtpDrafter.from_target(again)
    with pytest.raises(
        CheckpointError, match=r"must be loaded from a checkpoint, .* but this `DeepseekV3ForCausalLM` was made anew"
    ):
        MtpDrafter.from_target(make_target("deepseek_v3"))


def test_weights_that_are_not_finite_are_refused(target: Any) -> None:
    path = Path(target.config._name_or_path) / "model.safetensors"
    weights = load_file(path)
    weights["mtp.norm.weight"][3] = torch.nan
    save_file(weights, path, {"format": "pt"})

    with pytest.raises(CheckpointError, match="must hold finite weights, but 1 hold NaN or infinity"):
        MtpDrafter.from_target(target)


def test_there_is_nothing_to_save_or_to_load_by_name(target: Any, tmp_path: Path) -> None:
    drafter = MtpDrafter.from_target(target)

    for refused in (
        lambda: drafter.save_pretrained(tmp_path / "drafter"),
        lambda: drafter.push_to_hub("someone/mtp"),
        lambda: MtpDrafter.from_pretrained(tmp_path),
    ):
        with pytest.raises(OptionError, match=r"must be made of its target.*`MtpDrafter.from_target\(target\)`"):
            refused()
    assert not (tmp_path / "drafter").exists()


def test_an_export_is_refused(target: Any, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"Only an .* or a `DFlashDrafter` can be exported, but this is a `MtpDrafter`"
    ):
        export_drafter(MtpDrafter.from_target(target), tmp_path / "dest", "vllm")


def test_options_are_fields_and_it_reads_the_heads_input_alone(target: Any) -> None:
    assert MtpDrafter.from_target(target, sliding_window=3).sliding_window == 3
    with pytest.raises(OptionError, match=r"`feature_layers` must be \[-1\], but they are \[0\]"):
        MtpDrafter.from_target(target, feature_layers=[0])
    with pytest.raises(OptionError, match="`MtpConfig` has no option `depth`"):
        MtpDrafter.from_target(target, depth=3)


def test_another_target_of_the_same_sizes_is_noticed(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    drafter, other = MtpDrafter.from_target(target), copy.deepcopy(target)
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.mul_(1.5)

    drafter.check_target(other)

    assert "is not quite the target this drafter was made for" in caplog.text
