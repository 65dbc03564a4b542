"""A target whose weights are a GGUF file is taken by every command as one of safetensors is, and can be saved."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.gguf_files import round_to_q8, write_gguf
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands import loading
from transformers_falcon_spec.errors import CheckpointError, OptionError

pytestmark = pytest.mark.commands
OF_THE_HUB = {"find", "publish"}  # their target is a name alone
FILE = "tiny.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target `target/tiny.gguf`, the same as safetensors, a drafter, prompts and conversations."""
    made = tmp_path_factory.mktemp("gguf")
    (made / "target").mkdir()
    target = make_target()
    round_to_q8(target)
    target.save_pretrained(made / "plain")
    write_gguf(target, made / "target" / FILE)
    make_drafter(target, block_size=2).save_pretrained(made / "drafter")
    (made / "sums.jsonl").write_text('{"id": "a", "prompt": "one plus two"}\n', encoding="utf-8")
    turns = [{"role": "user", "content": "one plus two"}, {"role": "assistant", "content": "three and four"}]
    (made / "talk.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    return made


def test_it_is_read_as_what_it_was_written_from_and_can_be_saved(folder: Path, tmp_path: Path) -> None:
    target, tokenizer = loading.load_target(str(folder / "target"), "float32", "cpu")
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    ids = make_prompt()
    expected = AutoModelForCausalLM.from_pretrained(folder / "plain")(ids).logits
    torch.testing.assert_close(target(ids).logits, expected)
    saved, _ = loading.load_target(str(tmp_path), "float32", "cpu")
    torch.testing.assert_close(saved(ids).logits, expected)
    assert target.config._name_or_path == str(folder / "target")  # which drafters record
    assert tokenizer.chat_template


def test_its_weights_are_plain_so_that_steps_have_fixed_shapes(folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", gguf_file=FILE, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    drafter = InformedDrafter(RandomDrafter(), runs.plain(target).sequences)
    drafter.generation_config.capture = True

    pair = runs.both(target, drafter)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1


def test_every_command_that_loads_a_target_takes_a_gguf_file() -> None:
    taking = set()
    for name in cli.COMMANDS:
        names = {field.name for kind in cli.options_of(name, is_whole=False) for field in fields(kind)}
        if "target" in names:
            taking.add(name)
            assert ("gguf_file" in names) == (name not in OF_THE_HUB), name

    assert len(taking) > len(OF_THE_HUB) + 5


@pytest.mark.usefixtures("machine_clock")
@pytest.mark.parametrize("command", ["generate", "bench", "parity", "trees", "doctor"])
def test_commands_draft_for_the_only_file_of_a_folder(
    folder: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["--prompts", str(folder / "sums.jsonl"), "--max_new_tokens", "8"]
    results = ["--output", str(tmp_path / "out.json")]
    others = {"generate": ["--compare"], "trees": [*results, "--nodes", "4"], "doctor": []}
    drafter = ["--methods" if command == "bench" else "--drafter", str(folder / "drafter")]

    status = cli.main([command, "--target", str(folder / "target"), *drafter, *texts, *others.get(command, results)])

    assert status == 0, capsys.readouterr()


@pytest.mark.parametrize("command", ["train", "regenerate"])
def test_a_named_file_is_taken_though_others_lie_beside_it(folder: Path, command: str, tmp_path: Path) -> None:
    for name in (FILE, "other.gguf"):
        (tmp_path / name).write_bytes((folder / "target" / FILE).read_bytes() if name == FILE else b"no such file")
    target = ["--target", str(tmp_path), "--gguf_file", FILE, "--data", str(folder / "talk.jsonl")]
    others = {
        "train": ["--output_dir", str(tmp_path / "drafter"), "--max_steps", "1", "--report_to", "none"],
        "regenerate": ["--output", str(tmp_path / "out.jsonl"), "--max_new_tokens", "4"],
    }

    assert cli.main([command, *target, *others[command]]) == 0
    with pytest.raises(OptionError, match=r"`other.gguf`, `tiny.gguf`. Name one: `--gguf_file other.gguf`"):
        loading.read_config(str(tmp_path))


def test_weights_of_another_kind_beside_a_gguf_file_are_the_targets(folder: Path, tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path)
    (tmp_path / FILE).write_bytes(b"no such file")

    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    with pytest.raises(OptionError, match="must have a tokenizer"):  # so that config and weights were read
        loading.load_target(str(tmp_path), "auto", "cpu")
    assert config.model_type == "llama"


@pytest.mark.parametrize("wrong", ["kind", "cut"])
def test_a_file_that_transformers_cannot_read_is_refused_with_its_words(
    folder: Path, wrong: str, tmp_path: Path
) -> None:
    file = tmp_path / FILE
    if wrong == "kind":
        write_gguf(make_target(), file, kind="rwkv7")
    else:
        file.write_bytes((folder / "target" / FILE).read_bytes()[:100])
    words = {"kind": "architecture rwkv7 is not supported yet", "cut": "must be a GGUF file"}

    with pytest.raises(CheckpointError, match=words[wrong]):
        loading.load_target(str(tmp_path), "auto", "cpu")


def test_without_the_package_the_extra_that_brings_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(package: str) -> None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr("transformers_falcon_spec.drafters.target_loading.import_module", missing)

    assert cli.main(["doctor", "--target", str(folder / "target")]) == 1
    assert "transformers_falcon_spec[gguf]" in capsys.readouterr().err
