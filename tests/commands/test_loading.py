"""Commands load any target that can be drafted for, where it runs best and in its own type, or say why they cannot."""

import importlib
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Llama4Config

from tests.chat import make_tokenizer, save_target
from tests.generation.test_vision import _make_target
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands import loading
from transformers_falcon_spec.commands.options import TargetOptions
from transformers_falcon_spec.drafters.target_loading import target_class

pytestmark = pytest.mark.unit
VISION = ("llava", "qwen2_5_vl")


@pytest.fixture(scope="module", params=VISION)
def vision_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp(request.param)
    target = _make_target(request.param).float()
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    make_drafter(target, block_size=2).save_pretrained(folder / "drafter")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n', encoding="utf-8")
    return {"target": str(folder / "target"), "drafter": str(folder / "drafter"), "prompts": str(prompts)}


@pytest.mark.usefixtures("machine_clock")
@pytest.mark.parametrize("command", ["generate", "parity", "doctor", "trees"])
def test_a_target_with_images_is_taken_by_every_command(
    vision_pair: dict[str, str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["--prompts", vision_pair["prompts"], "--max_new_tokens", "8"]
    results = ["--output", str(tmp_path / "out.json")]
    options = {"generate": [*texts, "--compare"], "parity": [*texts, *results], "doctor": texts}
    options |= {"trees": [*texts, *results, "--nodes", "4"]}
    pair = ["--target", vision_pair["target"], "--drafter", vision_pair["drafter"]]

    status = cli.main([*command.split(), *pair, *options[command]])

    assert status == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("family", "conclusion"),
    [
        ("llama", "can be drafted for: it verifies trees"),
        ("bloom", "can be drafted for: it verifies each path of a tree as a row"),
        ("qwen3_next", "can be drafted for: it verifies trees"),  # three of four layers are recurrent
        ("rwkv", "cannot be drafted for: no drafts"),
    ],
)
def test_the_doctor_says_of_a_target_alone_whether_it_can_be_drafted_for(
    family: str, conclusion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target", family=family)

    status = cli.main(["doctor", "--target", str(tmp_path / "target"), "--json"])

    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert conclusion in report["conclusion"]
    assert [finding["name"] for finding in report["findings"]][:1] == {
        "bloom": ["no trees"],
        "rwkv": ["no drafts"],
    }.get(family, [])
    for finding in report["findings"]:  # hybrids are drafted for, so nobody is sent to targets of attention alone
        assert "attention" not in finding["remedy"]


def test_every_command_runs_on_the_best_device_and_in_the_targets_own_type() -> None:
    for path in Path(loading.__file__).parent.glob("*.py"):
        importlib.import_module(f"transformers_falcon_spec.commands.{path.stem}")
    commands = [TargetOptions]
    for command in commands:
        commands += [kind for kind in command.__subclasses__() if kind not in commands]

    assert len(commands) > 8
    for command in commands:
        defaults = {field.name: field.default for field in fields(command)}
        assert (defaults["device"], defaults["dtype"]) == ("auto", "auto"), command


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_is_loaded_in_the_type_that_it_was_saved_in(dtype: torch.dtype, tmp_path: Path) -> None:
    make_target().to(dtype).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)

    target, _ = loading.load_target(str(tmp_path), "auto", "auto")

    assert target.dtype == dtype


def test_the_class_is_that_of_the_checkpoint_where_several_fit() -> None:
    config = Llama4Config()

    assert target_class(config, "x").__name__ == "AutoModelForCausalLM"
    config.architectures = ["Llama4ForConditionalGeneration"]
    assert target_class(config, "x").__name__ == "AutoModelForImageTextToText"


def test_a_model_that_writes_no_text_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)

    assert cli.main(["doctor", "--target", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "is of the kind 'vit', which `AutoModelForCausalLM`" in said
    assert "a drafter is given as `--drafter`" in said


def test_a_folder_without_a_model_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

    assert cli.main(["generate", "--target", str(tmp_path), "--drafter", "any", "--prompt", "Hi"]) == 1
    assert f"`{tmp_path}` must hold a model that Transformers knows" in capsys.readouterr().err


def test_a_target_without_a_tokenizer_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_target().save_pretrained(tmp_path)

    assert cli.main(["doctor", "--target", str(tmp_path)]) == 1
    assert "must have a tokenizer beside its weights" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_noticed_before_an_id_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target", vocab_size=20)
    make_drafter(make_target(vocab_size=20)).save_pretrained(tmp_path / "drafter")
    pair = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]

    assert cli.main(["generate", *pair, "--prompt", "one plus two"]) == 1
    assert "tokens of the target, which has 20, but its tokenizer gives the id" in capsys.readouterr().err
