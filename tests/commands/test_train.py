"""`falcon-spec train`: from a target on disk and a file of conversations to a drafter that drafts for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from tests import reference
from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from tests.convert import foreign
from tests.tiny import make_prompt
from tests.training.runs import SMALL
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter, cli, disable, enable
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import portable
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import ConversationDataset, count_said, most_frequent

QUICK = ["--max_steps", "6", "--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none"]
QUICK += ["--eval_decode_prompts", "0"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and two files of conversations; a line of the first is broken."""
    folder = tmp_path_factory.mktemp("files")
    data = write_rows(folder / "data.jsonl", make_rows(12))
    data.write_text(data.read_text() + "broken\n")
    return {
        "target": str(save_target(folder / "target", **SMALL)),
        "data": str(data),
        "eval_data": str(write_rows(folder / "eval.jsonl", make_rows(4, seed=1))),
    }


def train(files: dict[str, str], folder: Path, *options: str) -> int:
    """Exit status of a run of six steps."""
    common = ["--target", files["target"], "--data", files["data"], "--output_dir", str(folder)]
    return cli.main(["train", *common, *QUICK, *options])


def test_a_drafter_of_other_software_is_trained_further(files: dict[str, str], tmp_path: Path) -> None:
    sizes = AutoModelForCausalLM.from_pretrained(files["target"]).config
    fields = {name: getattr(sizes, name) for name in ("hidden_size", "vocab_size")}
    source = foreign.written(tmp_path / "source", *foreign.eagle(**fields), "model.safetensors")

    status = train(files, tmp_path / "out", "--drafter", str(source), "--max_steps", "1", "--learning_rate", "0")

    drafter, before = EagleDrafter.from_pretrained(tmp_path / "out"), load_file(source / "model.safetensors")
    assert status == 0
    assert torch.equal(drafter.fc.weight, before["fc.weight"])


def test_a_drafter_comes_out_with_its_tree_and_its_record(files: dict[str, str], tmp_path: Path) -> None:
    status = train(files, tmp_path, "--eval_data", files["eval_data"], "--draft_tree_nodes", "7", "--seed", "3")

    drafter = FalconSpecDrafter.from_pretrained(tmp_path)
    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert status == 0
    assert len(drafter.draft_tree) == 7
    assert drafter.config.target_name_or_path == portable(files["target"])
    assert {"command", "commit", "date", "versions", "device", "train_seconds"} <= set(record)
    assert (record["seed"], record["num_examples"]) == (3, 12)
    assert record["data"] == portable({"train": [files["data"]], "eval": [files["eval_data"]]})
    assert record["curve"][-1]["step"] == 6
    assert drafter.sliding_window == record["trained_length"] > 0


def test_evaluation_data_that_ask_what_the_training_asks_are_told_of(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = train(files, tmp_path, "--eval_data", files["data"], files["eval_data"], "--max_steps", "1")

    assert status == 0
    assert "12 of 16 examples to evaluate on ask what rows of the training ask" in caplog.text


def test_the_drafter_drafts_for_the_target_it_was_trained_for(files: dict[str, str], tmp_path: Path) -> None:
    train(files, tmp_path)
    target = AutoModelForCausalLM.from_pretrained(files["target"]).double()
    drafter = FalconSpecDrafter.from_pretrained(tmp_path).double()
    messages = make_rows(1)[0][:1]
    prompt = make_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]

    out = target.generate(
        prompt,
        assistant_model=drafter,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
    )

    assert out.sequences.tolist() == reference.greedy(target, prompt, 8).tolist()
    assert out.speculation.num_passes > 0


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--drafter_config", "block_size=3", "recurrence=token"], {"block_size": 3, "recurrence": "token"}),
        (["--drafter_config", "num_hidden_layers=2"], {"num_hidden_layers": 2}),
        (["--drafter_config", "feature_layers=[0, -1]"], {"feature_layers": [0, -1], "feature_size": 64}),
    ],
)
def test_options_of_the_drafter_reach_its_config(
    files: dict[str, str], tmp_path: Path, options: list[str], fields: dict[str, Any]
) -> None:
    status = train(files, tmp_path, *options, "--max_steps", "1", "--limit", "4", "--max_length", "32")

    config = FalconSpecDrafter.from_pretrained(tmp_path).config
    assert status == 0
    assert {name: getattr(config, name) for name in fields} == fields


def test_an_eagle_drafter_gets_the_vocabulary_that_the_assistant_uses(files: dict[str, str], tmp_path: Path) -> None:
    fields = ["version=3", "feature_layers=[1, -1]", "draft_vocab_size=20"]
    options = ["--method", "eagle", "--drafter_config", *fields, "--ttt_steps", "2", "--eval_data", files["eval_data"]]

    status = train(files, tmp_path, *options, "--draft_tree_nodes", "6")

    drafter = EagleDrafter.from_pretrained(tmp_path)
    examples = list(ConversationDataset(make_rows(12), make_tokenizer(), 512))
    assert status == 0
    assert drafter.draft_token_ids.tolist() == most_frequent(count_said(examples, drafter.config.vocab_size), 20)
    assert len(drafter.draft_tree) == 6
    assert drafter.is_tree_dynamic


@pytest.mark.parametrize("fields", [{"num_heads": 2, "has_lm_heads": False}, {"num_heads": 3, "num_layers": 2}])
def test_a_medusa_drafter_comes_out_with_its_tree(
    files: dict[str, str], tmp_path: Path, fields: dict[str, Any]
) -> None:
    options = [f"{name}={json.dumps(value)}" for name, value in fields.items()]

    status = train(
        files, tmp_path, "--method", "medusa", "--eval_data", files["eval_data"], "--drafter_config", *options
    )

    drafter = MedusaDrafter.from_pretrained(tmp_path)
    assert status == 0
    assert {name: getattr(drafter.config, name) for name in fields} == fields
    assert len(drafter.stored_tree["parents"]) == 16


@pytest.fixture(scope="module")
def draft_model(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model, distilled from the target; it has one of the target's two layers."""
    folder = tmp_path_factory.mktemp("draft")
    options = ["--eval_data", files["eval_data"], "--learning_rate", "1e-3"]
    assert train(files, folder, "--method", "ar", "--drafter_config", "num_hidden_layers=1", *options) == 0
    return folder


def test_a_draft_model_is_a_checkpoint_of_transformers_with_tokenizer_and_record(draft_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(draft_model)
    record = json.loads((draft_model / "training.json").read_text(encoding="utf-8"))

    assert (type(model).__name__, model.config.num_hidden_layers, model.dtype) == (
        "LlamaForCausalLM",
        1,
        torch.float32,
    )
    assert model.generation_config.eos_token_id in (2, [2])  # 5.17 makes a list of it
    assert AutoTokenizer.from_pretrained(draft_model).get_vocab() == make_tokenizer().get_vocab()
    assert "eval_accuracy_at_1" in record["curve"][-1]


@pytest.mark.parametrize("is_patched", [True, False])
def test_stock_assisted_generation_with_a_draft_model_writes_the_greedy_text(
    files: dict[str, str], draft_model: Path, is_patched: bool
) -> None:
    target = AutoModelForCausalLM.from_pretrained(files["target"]).double()
    model = AutoModelForCausalLM.from_pretrained(draft_model).double()
    prompt, calls = make_prompt(), []
    model.register_forward_hook(lambda *_: calls.append(1))

    (enable if is_patched else disable)()
    try:
        texts = [
            target.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, assistant_model=assistant)
            for assistant in (None, model)
        ]
    finally:
        enable()

    assert texts[0].tolist() == texts[1].tolist()
    assert calls


def test_a_dflash_drafter_comes_out_for_stock_generate(files: dict[str, str], tmp_path: Path) -> None:
    fields = ["num_hidden_layers=1", "block_size=3", "target_layer_ids=[0]"]
    options = ["--eval_data", files["eval_data"], "--num_anchors", "4", "--cache_features", str(tmp_path / "features")]

    status = train(files, tmp_path / "out", "--method", "dflash", "--drafter_config", *fields, *options)

    target = AutoModelForCausalLM.from_pretrained(files["target"]).double()
    drafter = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.double)
    texts = [
        target.generate(make_prompt(), max_new_tokens=12, do_sample=False, eos_token_id=None, **options)
        for options in ({}, {"assistant_model": drafter, "speculation_type": "dflash"})
    ]
    assert status == 0
    assert drafter.config.block_size == 3
    assert texts[0].tolist() == texts[1].tolist()


def test_a_target_in_half_precision_trains_a_drafter_in_full(files: dict[str, str], tmp_path: Path) -> None:
    status = train(files, tmp_path, "--target_dtype", "bfloat16")

    assert status == 0
    assert FalconSpecDrafter.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32


def test_a_folder_with_a_begun_run_is_not_trained_over(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(files, tmp_path, "--save_steps", "3")

    status = train(files, tmp_path)

    assert status == 1
    assert (
        "holds `checkpoint-6` of an earlier run. Go on with `--resume_from_checkpoint true`" in capsys.readouterr().err
    )


@pytest.mark.parametrize("wish", ["true", "false", "checkpoint-3"])
def test_a_run_goes_on_as_the_options_say(files: dict[str, str], tmp_path: Path, wish: str) -> None:
    train(files, tmp_path, "--save_steps", "3")
    wish = wish if wish in ("true", "false") else str(tmp_path / wish)

    status = train(files, tmp_path, "--resume_from_checkpoint", wish)

    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert status == 0
    steps = [entry["step"] for entry in record["curve"] if "loss" in entry]
    assert steps == sorted(set(steps))


def test_a_run_that_is_written_over_leaves_no_checkpoint_to_go_on_from(files: dict[str, str], tmp_path: Path) -> None:
    train(files, tmp_path, "--save_steps", "3")

    train(files, tmp_path, "--max_steps", "2", "--save_steps", "1", "--resume_from_checkpoint", "false")

    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


def test_going_on_where_nothing_was_begun_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = train(files, tmp_path / "drafter", "--resume_from_checkpoint", "true")

    assert status == 1
    assert "`--resume_from_checkpoint true` needs a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_folder_with_a_model_is_trained_over_only_if_asked(
    files: dict[str, str], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / name
    model.write_text("{}", encoding="utf-8")
    once = ["--max_steps", "1", "--save_strategy", "no"]

    status = train(files, tmp_path, *once)

    assert status == 1
    assert f"must hold no model, for it would be written over, but it holds `{name}`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert train(files, tmp_path, *once, "--resume_from_checkpoint", "false") == 0
    assert (tmp_path / "model.safetensors").is_file()


def test_a_drafter_is_not_trained_further_in_its_own_folder(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ["--max_steps", "1", "--save_strategy", "no"]
    train(files, tmp_path, *once)
    before = (tmp_path / "model.safetensors").read_bytes()

    status = train(files, tmp_path, *once, "--drafter", str(tmp_path))

    assert status == 1
    assert "it holds `config.json`" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == before


def _without_template(folder: Path) -> str:
    path = save_target(folder / "target", **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    (path / "chat_template.jinja").unlink()
    assert tokenizer.chat_template
    return str(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data", "nowhere.jsonl"], "ConversationError: The data file `nowhere.jsonl` does not exist"),
        (["--drafter_config", "block_size=0"], "OptionError: `block_size` must be at least 1, but it is 0"),
        (["--drafter_config", "recurrence=both"], "OptionError: `recurrence` must be one of"),
        (["--drafter_config", "block_size"], "OptionError: `--drafter_config` takes NAME=VALUE"),
        (["--drafter_config", "size=3"], "OptionError: `FalconSpecConfig` has no option `size`"),
        (["--max_length", "2"], "TrainingError: Not one of 12 conversations has an assistant token in 2 tokens"),
        (["--method", "ar", "--drafter_config", "depth=3"], "OptionError: `LlamaConfig` has no option `depth`"),
        (
            ["--method", "ar", "--drafter_config", "vocab_size=5"],
            "DrafterMismatchError: A draft model must have the target's",
        ),
        (["--early_stopping_patience", "1"], "OptionError: `--early_stopping_patience` needs evaluations to compare"),
        (["--early_stopping_patience", "1", "--metric_for_best_model", "loss"], "OptionError: `--early_stopping_pat"),
        (["--load_best_model_at_end", "true"], "OptionError: --load_best_model_at_end requires the save and eval"),
        (["--train_sampling_strategy", "longest"], "OptionError: `train_sampling_strategy` must be one of ('random',"),
        (["--per_device_eval_batch_size", "0"], "OptionError: `per_device_eval_batch_size` must be at least 1"),
        (["--resume_from_checkpoint", "nowhere"], "TrainingError: `nowhere` must hold optimizer and schedule"),
        (["--glancing_ratio", "3"], "OptionError: `glancing_ratio` must lie in 0..1"),
        (["--drafter_config", "feature_layers=[9]"], "TargetError: Feature layers must be -1 or lie in"),
    ],
)
def test_what_is_wrong_is_said_on_the_error_stream_with_status_1(
    files: dict[str, str], tmp_path: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = train(files, tmp_path, *options)

    assert status == 1
    assert text in capsys.readouterr().err


def test_a_deepspeed_file_reaches_the_arguments_of_the_trainer(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(args: DrafterTrainingArguments) -> None:
        raise OptionError(f"reached with {args.deepspeed}")

    monkeypatch.setattr(TrainingArguments, "__post_init__", reached)

    train(files, tmp_path, "--deepspeed", "zero2.json")

    assert "reached with zero2.json" in capsys.readouterr().err


def test_a_target_without_chat_template_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = train({**files, "target": _without_template(tmp_path)}, tmp_path / "out")

    assert status == 1
    assert "TrainingError: The tokenizer" in capsys.readouterr().err


def test_features_are_extracted_once_for_several_runs(files: dict[str, str], tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    losses: list[list[float]] = []
    times: set[int] = set()  # of the one shard

    for name, options in (
        ("first", ["--cache_features", str(shards)]),
        ("second", ["--cache_features", str(shards)]),
        ("none", []),
    ):
        assert train(files, tmp_path / name, "--logging_steps", "1", *options) == 0
        curve = json.loads((tmp_path / name / "training.json").read_text(encoding="utf-8"))["curve"]
        losses.append([entry["loss"] for entry in curve if "loss" in entry])
        times.add(*(shard.stat().st_mtime_ns for shard in shards.iterdir()))

    assert len(times) == 1
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
