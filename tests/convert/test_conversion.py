"""What a conversion writes, what it takes from the target, and the command that runs it."""

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from tests.training.runs import example_batch
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter, cli
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.convert.conversion import RECORD, new_folder
from transformers_falcon_spec.errors import CheckpointError
from transformers_falcon_spec.provenance import portable
from transformers_falcon_spec.training.objectives import objective_of

from . import foreign
from .drafting import converted
from .refusals import MAKERS

CLASSES: dict[str, Any] = {
    "falcon": FalconSpecDrafter,
    "eagle": EagleDrafter,
    "eagle3": EagleDrafter,
    "speculators": EagleDrafter,
    "medusa": MedusaDrafter,
    "medusa v2": MedusaDrafter,
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_folder_holds_a_drafter_and_where_it_comes_from(name: str, tmp_path: Path) -> None:
    config, weights = MAKERS[name]()
    source, dest = foreign.written(tmp_path / "source", config, weights), tmp_path / "new" / "dest"

    kind = convert_checkpoint(source, dest)

    assert {path.name for path in dest.iterdir()} == {
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
    }
    record = json.loads((dest / "conversion.json").read_text())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()}
    assert (record["source"], record["format"], record["source_sha256"]) == (portable(source), kind.name, digests)
    unread = sorted(name for name in weights if "weight_hh" in name)  # Falcon's LSTM starts afresh at every token
    assert record["dropped_weights"] == unread  # nothing is known of the target's weights
    drafter = CLASSES[name].from_pretrained(dest)
    assert drafter.config.vocab_size == VOCAB_SIZE
    num_kept = sum(value.numel() for name, value in weights.items() if name not in unread)
    assert sum(value.numel() for value in drafter.state_dict().values()) == num_kept
    drafter.check_target(make_target("llama"))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("falcon", {"_name_or_path": "a/target", "eos_token_id": 2}, ("a/target", None, 2)),
        ("eagle", {"_name_or_path": "", "bos_token_id": 5, "eos_token_id": [7, 8]}, (None, 5, [7, 8])),
        ("speculators", {}, ("someone/a-target", None, None)),
        ("medusa", {}, ("someone/a-target", None, None)),
    ],
)
def test_facts_of_the_target_are_those_that_the_source_gives(
    name: str, fields: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    config, weights = MAKERS[name]()

    drafter = converted(CLASSES[name], foreign.written(tmp_path / "source", {**config, **fields}, weights))

    found = drafter.config
    assert (found.target_name_or_path, found.bos_token_id, found.eos_token_id) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_a_named_target_gives_its_name_and_special_ids(name: str, tmp_path: Path) -> None:
    make_target("llama", eos_token_id=11).save_pretrained(tmp_path / "target")

    source = foreign.written(tmp_path / "source", *MAKERS[name]())
    drafter = converted(CLASSES[name], source, str(tmp_path / "target"))

    assert drafter.config.target_name_or_path == portable(tmp_path / "target")
    assert (drafter.config.bos_token_id, drafter.config.eos_token_id) == (1, 11)


def test_heads_that_do_not_say_how_large_the_vocabulary_is_take_it_from_the_target(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.medusa(has_lm_heads=False))

    drafter = converted(MedusaDrafter, source, str(tmp_path / "target"))

    assert drafter.config.vocab_size == VOCAB_SIZE


def test_layers_that_eagle3_does_not_name_follow_from_the_depth_of_the_target(tmp_path: Path) -> None:
    make_target("llama", num_hidden_layers=9).save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.eagle3())

    drafter = converted(EagleDrafter, source, str(tmp_path / "target"))

    assert drafter.feature_layers == (2, 4, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    config, weights = MAKERS["eagle3"]()
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    convert_checkpoint(foreign.written(tmp_path / "source", config, weights), tmp_path / "dest")

    stored = load_file(tmp_path / "dest" / "model.safetensors")
    drafter = EagleDrafter.from_pretrained(tmp_path / "dest", dtype="auto")

    assert {value.dtype for name, value in stored.items() if name not in ("d2t", "t2d")} == {dtype}
    assert (stored["d2t"].dtype, stored["t2d"].dtype, drafter.dtype) == (torch.int64, torch.bool, dtype)


def test_what_is_left_out_or_filled_in_is_said_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_target("llama")
    config, weights = foreign.falcon(num_layers=1, qkv_bias=True)
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
    source = foreign.written(tmp_path / "source", config, weights)

    with caplog.at_level("INFO", logger="transformers_falcon_spec"):
        convert_checkpoint(source, tmp_path / "dest", target)

    record = json.loads((tmp_path / "dest" / "conversion.json").read_text())
    assert record["filled_weights"] == {"layers.0.self_attn.o_proj.bias": 0.0}
    assert record["dropped_weights"] == ["embed_tokens.weight", "lstm.weight_hh_l0", "lstm.weight_hh_l1"]
    assert "Left out: embed_tokens.weight, which equals the target's; lstm.weight_hh_l0" in caplog.text
    assert "layers.0.self_attn.o_proj.bias" in caplog.text


def test_weights_of_several_types_are_stored_in_the_one_that_holds_all(tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    mixed = {name: value.bfloat16() if "mlp" in name else value for name, value in weights.items()}

    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, mixed))

    assert drafter.dtype == torch.float32
    assert drafter.layer.mlp.up_proj.weight.equal(mixed["layers.0.mlp.up_proj.weight"].float())
    assert drafter.fc.weight.equal(weights["fc.weight"])


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_in_parts_are_read_whole(ending: str, tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    stem = "model" if ending == "safetensors" else "pytorch_model"
    source, weight_map = tmp_path / "source", {}
    foreign.written(source, config, {}, "unused.pt")
    for number, names in enumerate([list(weights)[::2], list(weights)[1::2]], start=1):
        file = f"{stem}-0000{number}-of-00002.{ending}"
        part = {name: weights[name] for name in names}
        save_file(part, source / file) if ending == "safetensors" else torch.save(part, source / file)
        weight_map |= dict.fromkeys(names, file)
    (source / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    drafter = converted(EagleDrafter, source)

    assert drafter.fc.weight.equal(weights["fc.weight"])
    assert len(json.loads((tmp_path / "converted" / "conversion.json").read_text())["source_sha256"]) == 3


def test_what_follows_from_other_weights_or_is_the_targets_own_may_be_there_or_not(tmp_path: Path) -> None:
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    config, weights = MAKERS["speculators"]()
    own = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "verifier_lm_head.weight": torch.zeros(VOCAB_SIZE, foreign.HIDDEN),
        "verifier_norm.weight": torch.zeros(foreign.HIDDEN),
    }
    with_copies = {**weights, **own}
    without_t2d = {name: value for name, value in weights.items() if name != "t2d"}

    found = [
        converted(
            EagleDrafter, foreign.written(tmp_path / name / "source", config, each), str(tmp_path / "target")
        ).state_dict()
        for name, each in [("plain", weights), ("copies", with_copies), ("less", without_t2d)]
    ]

    assert found[0]["t2d"].equal(weights["t2d"])
    assert all(part.keys() == found[0].keys() for part in found)
    assert all(part[name].equal(value) for part in found for name, value in found[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["falcon", "eagle", "eagle3", "speculators"])
def test_embeddings_that_are_not_known_as_the_targets_stay_the_drafters_own(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    config, weights = MAKERS[name]()
    theirs = target.get_input_embeddings().weight.detach()
    changed = theirs.clone()
    changed[7] *= 1.5
    equal, own = ({**weights, "embed_tokens.weight": each.to(dtype)} for each in (theirs, changed))

    found = {
        label: converted(CLASSES[name], foreign.written(tmp_path / label / "source", config, each), of)
        for label, each, of in [
            ("a copy", equal, str(tmp_path / "target")),
            ("others", own, str(tmp_path / "target")),
            ("unknown", equal, None),
        ]
    }

    has_own = {label: drafter.config.own_embeddings for label, drafter in found.items()}
    assert has_own == {"a copy": False, "others": True, "unknown": True}
    assert found["others"].embed_tokens.weight.equal(own["embed_tokens.weight"].float())
    assert not any("embed_tokens" in key for key in found["a copy"].state_dict())


@pytest.mark.parametrize("name", ["falcon", "eagle3"])
def test_a_drafter_reads_its_own_embeddings_in_drafting_and_in_training(name: str, tmp_path: Path) -> None:
    target = make_target("llama", num_hidden_layers=4)
    config, weights = MAKERS[name]()
    theirs = target.get_input_embeddings().weight.detach()
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    drafters = {}
    for label, table in {"theirs": theirs, "own": theirs[order].clone()}.items():
        source = foreign.written(tmp_path / label, config, {**weights, "embed_tokens.weight": table})
        convert_checkpoint(source, tmp_path / f"to-{label}", target)
        drafters[label] = CLASSES[name].from_pretrained(tmp_path / f"to-{label}").eval()
    same = copy.deepcopy(drafters["own"])
    same.embed_tokens.weight.data = theirs.clone()
    prompt = torch.randint(6, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))

    runs = {
        label: target.generate(
            prompt, assistant_model=each, max_new_tokens=24, do_sample=False, return_dict_in_generate=True
        )
        for label, each in {**drafters, "same": same}.items()
    }
    embeds = {
        label: objective_of(each).read_target(each, target)(example_batch()).token_embeds
        for label, each in drafters.items()
    }

    texts = [run.sequences.tolist() for run in runs.values()]
    assert texts[0] == texts[1] == texts[2]
    drafted = {label: run.speculation.num_drafted for label, run in runs.items()}
    assert drafted["same"] == drafted["theirs"] > 0
    ids = example_batch()["input_ids"][:, 1:]
    assert embeds["own"].equal(theirs[order][ids])
    assert embeds["theirs"].equal(theirs[ids])


def test_trained_embeddings_that_are_missing_are_named(tmp_path: Path) -> None:
    config, weights = foreign.eagle3_speculators(embed_requires_grad=True)
    source = foreign.written(tmp_path / "source", config, weights)

    with pytest.raises(CheckpointError, match=r"missing: \['embed_tokens.weight'\]"):
        convert_checkpoint(source, tmp_path / "dest")


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_tensor_that_no_format_knows_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, weights = MAKERS[name]()
    source = foreign.written(tmp_path / "source", config, {**weights, "layers.0.extra_norm.weight": torch.ones(4)})

    with pytest.raises(CheckpointError, match=r"layers\.0\.extra_norm\.weight"):
        convert_checkpoint(source, tmp_path / "dest")


@pytest.mark.parametrize("kind", ["d2t", "t2d"])
def test_maps_of_a_whole_vocabulary_that_change_tokens_are_refused(kind: str, tmp_path: Path) -> None:
    config, weights = foreign.eagle3_speculators(draft_vocab_size=VOCAB_SIZE)
    maps = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.long), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}
    maps[kind][3] = 1 - maps[kind][3].long()
    source = foreign.written(tmp_path / "source", config, {**weights, **maps})

    with pytest.raises(
        CheckpointError,
        match=r"`d2t` must lead to different tokens .* every one to itself",
    ):
        convert_checkpoint(source, tmp_path / "dest")


def test_maps_between_vocabularies_that_are_alike_are_left_out(tmp_path: Path) -> None:
    config, weights = foreign.eagle3_speculators(draft_vocab_size=VOCAB_SIZE)
    maps = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.long), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}

    drafter = converted(EagleDrafter, foreign.written(tmp_path / "source", config, {**weights, **maps}))

    assert drafter.draft_token_ids is None


def test_of_two_files_the_one_that_cannot_hold_code_is_read(tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    source = foreign.written(tmp_path / "source", config, weights, "model.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"no pickle")

    assert converted(EagleDrafter, source).fc.weight.equal(weights["fc.weight"])


def test_the_command_takes_source_and_dest_as_positional_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, dest = foreign.written(tmp_path / "source", *foreign.falcon()), tmp_path / "dest"
    dest.mkdir()

    assert cli.main(["convert", str(source), str(dest)]) == 0
    assert "converted from Falcon" in capsys.readouterr().out
    assert FalconSpecDrafter.from_pretrained(dest).config.recurrence == "token"
    assert cli.main(["convert", str(source), str(dest)]) == 1
    assert "OptionError: `DEST` must be a new or an empty folder" in capsys.readouterr().err


def test_a_folder_that_is_there_stays_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = foreign.written(tmp_path / "source", *foreign.falcon())
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "link").symlink_to("large_disk")
    (tmp_path / "present").mkdir()
    monkeypatch.chdir(tmp_path / "present")

    for dest in (".", tmp_path / "link"):
        convert_checkpoint(source, dest)

    for name in ("present", "link", "large_disk"):
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {"config.json", "generation_config.json", "model.safetensors", "conversion.json"}
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in Path.cwd().iterdir()} == files


def test_a_folder_that_is_there_stays_empty_if_something_fails(tmp_path: Path) -> None:
    def write_half() -> None:
        with new_folder(tmp_path) as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()

    assert not list(tmp_path.iterdir())


def test_the_record_that_says_a_folder_is_whole_is_moved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    rename = Path.rename

    def noted(path: Path, dest: Path) -> Path:
        moved.append(path.name)
        return rename(path, dest)

    monkeypatch.setattr(Path, "rename", noted)
    names = [*map(str, range(20)), RECORD]
    with new_folder(tmp_path) as folder:
        for name in names:
            (folder / name).touch()

    assert sorted(moved) == sorted(names)
    assert moved[-1] == RECORD


@pytest.mark.parametrize("of", [str, Path])
def test_a_target_is_named_by_text_or_by_path(tmp_path: Path, of: type) -> None:
    make_target("llama", num_hidden_layers=8).save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.eagle3())

    convert_checkpoint(source, tmp_path / "dest", of(tmp_path / "target"))

    assert EagleDrafter.from_pretrained(tmp_path / "dest").feature_layers == (2, 4, 5)


def test_the_command_asks_for_the_target_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_target("llama", num_hidden_layers=8).save_pretrained(tmp_path / "target")
    source, dest = foreign.written(tmp_path / "source", *foreign.eagle3()), tmp_path / "dest"

    assert cli.main(["convert", str(source), str(dest)]) == 1
    assert "--target NAME" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(dest), "--target", str(tmp_path / "target")]) == 0


@pytest.mark.parametrize(
    "command",
    [
        "calibrate --prompts x.jsonl --output x.json --save",
        "trees --nodes 4 --prompts x.jsonl --output x.json --save",
    ],
)
def test_commands_write_nothing_into_a_checkpoint_of_other_software(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = foreign.written(tmp_path / "source", *MAKERS["eagle"]())
    before = (source / "config.json").read_bytes()

    assert cli.main([*command.split(), "--target", "unused", "--drafter", str(source)]) == 1

    message = f"of other software, .* name `DEST`: `falcon-spec convert {re.escape(str(source))} DEST"
    assert re.search(message, capsys.readouterr().err)
    assert (source / "config.json").read_bytes() == before


@pytest.mark.parametrize("argv", [[], ["source"], ["source", "dest", "more"]])
def test_the_command_needs_both_arguments_and_no_more(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", *argv])

    assert end.value.code == 2
