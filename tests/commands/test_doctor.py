"""The doctor finds each planted fault by name and none in a sound pair; every finding is documented."""

import copy
import hashlib
import json
import math
import re
import time
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import sdpa_mask

from tests.chat import MARKED_TEMPLATE, make_tokenizer, save_target
from tests.clock import HandClock
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter
from transformers_falcon_spec.cli import main
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.convert.export import export_drafter
from transformers_falcon_spec.drafters.falcon import FalconCandidateGenerator
from transformers_falcon_spec.drafters.fingerprint import record_target
from transformers_falcon_spec.evaluation.doctor import (
    ADVICE,
    Report,
    built_in_prompts,
    check_length,
    check_tree_reading,
    diagnose,
    measured_fault,
    promise_of,
    training_record,
)

pytestmark = pytest.mark.benchmarks

ROOT = Path(__file__).parents[2]
PAIR = {"target": str(ROOT / "models" / "reference-target"), "drafter": str(ROOT / "models" / "falcon-reference")}
MEASURED = {"low acceptance", "slow machine"}  # untrained drafters have these as well


def deaf(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **_: Any
) -> tuple[Any, None]:
    """Attention over all that came before in the cache, whatever the mask says."""
    num_new, num_seen = query.shape[-2], key.shape[-2]
    causal = torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new)
    states = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal, scale=scaling, enable_gqa=True
    )
    return states.transpose(1, 2).contiguous(), None


def examined(
    target: Any, tokenizer: Any, drafter: Any, record: Any = MappingProxyType({}), max_new_tokens: int = 12
) -> Report:
    report = Report("target", "drafter")
    diagnose(target, tokenizer, drafter, built_in_prompts()[:1], max_new_tokens, record, report)
    return report


def names_of(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def signed_pair(**changes: Any) -> tuple[Any, Any, Any]:
    """A tiny target, its tokenizer and a drafter that knows both."""
    target, tokenizer = make_target(**changes), make_tokenizer()
    drafter = make_drafter(target)
    record_target(drafter.config, target, tokenizer)
    return target, tokenizer, drafter


def change_nothing(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    return target, tokenizer


def change_template(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    return target, make_tokenizer(MARKED_TEMPLATE)


def change_dtype(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    return target.bfloat16(), tokenizer


def change_weights(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    return target, tokenizer


def change_end(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    target.config.eos_token_id = 9
    return target, tokenizer


def change_attention(target: Any, tokenizer: Any) -> tuple[Any, Any]:
    AttentionInterface.register("deaf", deaf)
    AttentionMaskInterface.register("deaf", sdpa_mask)
    target.set_attn_implementation("deaf")
    return target, tokenizer


@pytest.mark.usefixtures("machine_clock")
@pytest.mark.parametrize(
    ("change", "fault", "message"),
    [
        (change_nothing, [], ""),
        (change_template, ["wrong template"], "chat template of"),
        (change_dtype, [], ""),
        (change_weights, ["other target"], "its layers differ"),
        (change_end, ["other target"], "`eos_token_id` to be 2 and not 9"),
        (change_attention, ["mask bug"], "`deaf`) ignores masks"),
    ],
)
def test_a_planted_fault_is_found_by_name_and_nothing_else(change: Any, fault: list[str], message: str) -> None:
    target, tokenizer, drafter = signed_pair()
    target, tokenizer = change(target, tokenizer)

    report = examined(target, tokenizer, drafter.to(target.dtype))

    assert [name for name in names_of(report) if name not in MEASURED] == fault
    assert message in "".join(finding.text for finding in report.findings)
    assert list(report.sections) == ["fingerprint", "reading", "length", "acceptance", "costs"]
    assert report.sections["reading"]["form"] == ("tree" if fault != ["mask bug"] else "paths")


def test_a_target_that_cannot_work_ends_the_diagnosis() -> None:
    _, tokenizer, drafter = signed_pair()

    report = examined(make_target(hidden_size=32, intermediate_size=48), tokenizer, drafter)

    assert names_of(report)[0] == "other target"
    assert "acceptance" not in report.sections
    assert report.conclusion.startswith("Drafting does not work: other target")


def test_a_target_that_reads_masks_but_no_trees_has_no_mask_bug() -> None:
    report = Report("target", "drafter")

    assert check_tree_reading(make_target("bloom"), report)
    assert names_of(report) == ["no trees"]
    assert report.sections["reading"]["form"] == "paths"
    assert report.sections["reading"]["reads_masks"] is not False


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    target = AutoModelForCausalLM.from_pretrained(PAIR["target"]).eval()
    drafter = FalconSpecDrafter.from_pretrained(PAIR["drafter"]).eval()
    return target, AutoTokenizer.from_pretrained(PAIR["target"]), drafter


@pytest.mark.usefixtures("machine_clock")
def test_the_embedded_pair_is_well(pair: Any) -> None:
    report = examined(*pair, training_record(PAIR["drafter"]), max_new_tokens=32)

    assert names_of(report) == []
    assert report.conclusion.startswith(("Nothing is wrong: ", "No fault is found, "))  # the clock decides
    assert report.sections["acceptance"]["acceptance_length"] > 1.5


@pytest.mark.usefixtures("machine_clock")
def test_a_slow_drafter_cannot_pay(pair: Any, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = FalconCandidateGenerator.propose

    def slow(self: Any, budget: Any) -> Any:
        clock.now += 100.0  # of a clock on which a read takes a second; the target alone has the machine's, of less
        time.sleep(0.5)  # of the machine's, by which whole texts are timed
        return propose(self, budget)

    monkeypatch.setattr(FalconCandidateGenerator, "propose", slow)
    clock.install(monkeypatch)

    target, tokenizer, _ = pair
    drafter = copy.deepcopy(pair[2])  # of which no earlier test has measured what it costs

    report = examined(target, tokenizer, drafter, training_record(PAIR["drafter"]), 8)

    (finding,) = report.findings
    assert finding.name == "slow machine"
    assert re.search(r"drafting takes \d+\.\d ms of a step", finding.text)


def test_acceptance_below_the_promise_is_reported_unless_something_else_explains_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = "transformers_falcon_spec.evaluation.doctor"
    costs_of = import_module(doctor)._costs
    monkeypatch.setattr(f"{doctor}._costs", lambda rows: costs_of(rows) | {"step_cost": 1.5})  # no clock
    target, tokenizer, drafter = pair
    forgetful = copy.deepcopy(drafter)
    with torch.no_grad():
        for name, weight in forgetful.named_parameters():
            if name.startswith(("layers", "transition", "recurrence")):
                weight.zero_()

    report = examined(target, tokenizer, forgetful, training_record(PAIR["drafter"]))

    acceptance, costs = report.sections["acceptance"], report.sections["costs"]
    assert acceptance["is_low"]
    assert names_of(report) == ["low acceptance"]
    assert "training.json promises 3.3" in report.findings[0].text
    assert measured_fault(acceptance, costs, ["other target"]) is None


def test_the_training_record_promises_a_chain_of_best_guesses() -> None:
    curve = json.loads((Path(PAIR["drafter"]) / "training.json").read_text())["curve"]
    shares = [curve[-1][f"eval_accuracy_at_{index}"] for index in range(1, 7)]

    promise = promise_of(training_record(PAIR["drafter"]))

    assert promise["promised_by_depth"] == shares
    assert promise["promised_length"] == pytest.approx(1 + sum(math.prod(shares[:depth]) for depth in range(1, 7)))


COSTS = {
    "plain_seconds": 0.010,
    "draft_seconds": 0.005,
    "verify_seconds": 0.030,
    "step_cost": 3.2,
    "speedup": 0.8,
}


@pytest.mark.parametrize(
    ("length", "promised", "step_cost", "expected"),
    [
        (3.0, 3.3, 1.9, None),
        (3.0, None, 1.9, None),
        (1.2, 3.3, 1.9, "low acceptance"),
        (1.2, None, 1.9, "low acceptance"),
        (1.2, 3.3, 3.5, "slow machine"),
        (3.0, None, 3.5, "slow machine"),
        (1.2, 3.3, None, None),
    ],
)
def test_too_little_kept_and_too_dear_are_two_findings(
    length: float, promised: float | None, step_cost: float | None, expected: str | None
) -> None:
    acceptance = {"acceptance_length": length, "is_low": False, "promised_by": "training.json"}
    acceptance |= {} if promised is None else {"promised_length": promised}

    finding = measured_fault(acceptance, COSTS | {"step_cost": step_cost}, [])

    assert (finding and finding.name) == expected
    if expected == "slow machine":
        assert "reading a draft takes 30.0 ms, 3.0 times a single token" in finding.text
    assert measured_fault(acceptance, COSTS | {"step_cost": step_cost, "speedup": 1.2}, []) is None  # smaller ones pay


@pytest.mark.parametrize(("window", "is_found"), [(None, True), (40, False), (41, True)])
def test_texts_beyond_the_trained_length_are_named_unless_a_window_hides_them(
    window: int | None, is_found: bool
) -> None:
    target, _, drafter = signed_pair()
    drafter.config.sliding_window, report = window, Report("target", "drafter")

    check_length(drafter, 200, {"trained_length": 40}, report)

    assert names_of(report) == ["long texts"] * is_found
    assert report.sections["length"] == {"longest_text": 200, "trained_length": 40, "sliding_window": window}
    check_length(drafter, target.config.max_position_embeddings, {}, other := Report("target", "drafter"))
    assert not other.findings  # nothing is known but the context
    check_length(make_medusa(target), 200, {"trained_length": 40}, other)
    assert not other.findings  # heads look at the newest token alone


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_limit_that_leaves_no_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--target", PAIR["target"], "--drafter", PAIR["drafter"], "--limit", "0"])

    assert status == 1
    assert "OptionError: `limit` must be at least 1, but it is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spoil", [cut, lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), Path.unlink]
)
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_weights_that_are_not_whole_are_found_by_name(
    part: str, spoil: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target")
    make_drafter(make_target()).save_pretrained(tmp_path / "drafter")
    spoil(tmp_path / part / "model.safetensors")
    folders = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]

    assert main(["doctor", *folders, "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding["name"] == "broken checkpoint"
    assert finding["documentation"] == "docs/troubleshooting.md#broken-checkpoint"
    assert f"`{tmp_path / part}` cannot be loaded" in finding["text"]
    assert "environment" in report


@pytest.mark.usefixtures("machine_clock")
def test_the_command_shows_every_section_and_the_conclusion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    record = {"curve": [{"eval_accuracy_at_1": 0.95}]}  # more than it reaches, whatever steps cost
    (tmp_path / "drafter" / "training.json").write_text(json.dumps(record))
    folders = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]

    assert main(["doctor", *folders, "--limit", "1", "--max_new_tokens", "8"]) == 0

    shown = capsys.readouterr().out
    for title in ("environment", "fingerprint", "reading", "acceptance", "costs", "conclusion"):
        assert re.search(rf"^{title} ", shown, flags=re.MULTILINE)
    assert re.search(r"^threads +\d+$", shown, flags=re.MULTILINE)
    assert "LOW ACCEPTANCE: " in shown or "SLOW MACHINE: " in shown


def test_every_finding_has_a_section_of_its_name_and_every_section_a_finding() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## What the doctor finds\n")[2].partition("\n## ")[0]

    headings = [heading.lower() for heading in re.findall(r"^### (.+)$", section, flags=re.MULTILINE)]

    assert sorted(headings) == sorted(ADVICE)


@pytest.mark.usefixtures("machine_clock")
@pytest.mark.parametrize("is_kept", [False, True], ids=["as exported", "converted into a folder"])
def test_a_converted_drafter_is_named_by_its_source_and_misses_no_training_record(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    folder = str(save_target(tmp_path / "target", num_hidden_layers=4))
    target = AutoModelForCausalLM.from_pretrained(folder)
    EagleDrafter.from_target(target, version=3, feature_layers=[1, 2, 3]).save_pretrained(tmp_path / "own")
    export_drafter(tmp_path / "own", tmp_path / "exported", "vllm")
    drafter = tmp_path / "exported"
    if is_kept:
        drafter = tmp_path / "converted"
        convert_checkpoint(tmp_path / "exported", drafter, folder)
    folders = ["--target", folder, "--drafter", str(drafter), "--limit", "1", "--max_new_tokens", "8"]

    assert main(["doctor", *folders, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor", *folders]) == 0
    shown = capsys.readouterr().out

    found = report["conversion"]
    assert found["source"].endswith("exported")
    assert found["format"] == "Eagle-3"
    weights = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert found["source_sha256"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert re.search(r"^conversion .*\nsource +\S*exported$", shown, flags=re.MULTILINE)
    assert {each["name"] for each in report["findings"]} <= MEASURED
    assert "training.json" not in shown


def test_a_drafter_that_was_not_converted_has_no_section_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_target(tmp_path / "target")
    make_drafter(AutoModelForCausalLM.from_pretrained(folder)).save_pretrained(tmp_path / "drafter")
    options = ["--limit", "1", "--max_new_tokens", "4", "--json"]

    assert main(["doctor", "--target", str(folder), "--drafter", str(tmp_path / "drafter"), *options]) == 0

    assert "conversion" not in json.loads(capsys.readouterr().out)
