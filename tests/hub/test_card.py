"""Cards: every figure comes from a file, gaps are named, and a template cannot run code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModel

from tests.hub.conftest import ROOT
from tests.tiny import make_target
from tools.hub_cards import RESULTS, render
from transformers_falcon_spec import DraftTree, FalconSpecDrafter, LookaheadDrafter, PublishError
from transformers_falcon_spec.evaluation.prompts import SET_NAMES
from transformers_falcon_spec.hub.card import TEMPLATE, About, Publication, read_figures, render_card

RESULTS_FOLDER = ROOT / "benchmarks/results"
NUMBER = re.compile(r"\d+(?:\.\d+)*")
FIGURES = re.compile(rf"^\| (?:{'|'.join(SET_NAMES.values())}) \|.*$", re.MULTILINE)


def leaves(value: Any) -> list[Any]:
    """Every number and string in a JSON value."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


def untraced(card: str, evidence: list[Any]) -> list[str]:
    """Numbers of a card, outside its table of figures, that neither the template nor `evidence` holds."""
    known = set(NUMBER.findall(re.sub(r"\{[{%].*?[%}]\}", "", TEMPLATE.read_text(encoding="utf-8"))))
    for leaf in leaves(evidence):
        if isinstance(leaf, str):
            known |= set(NUMBER.findall(leaf))
            known |= set(NUMBER.findall(leaf[:12])) | set(NUMBER.findall(leaf[:10]))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            known |= {str(leaf), f"{leaf:.2f}", f"{leaf:.3f}", f"{leaf:.0f}", f"{100 * leaf:.0f}", f"{leaf / 1e6:.2f}"}
    body = FIGURES.sub("", card.split("\n---\n", 1)[1])
    return [number for number in NUMBER.findall(body) if number not in known]


NUM_ROWS = {"falcon-smollm2-135m": 9}  # three sets and as many decodings; others have two


def evidence_of(name: str) -> list[Any]:
    """The files behind a card, without the rows of its table, and of the curve only the last row."""
    folder = ROOT / "models" / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    training = folder / "training.json"
    record = json.loads(training.read_text(encoding="utf-8")) if training.is_file() else {"curve": []}
    origins = [json.loads((RESULTS_FOLDER / file).read_text(encoding="utf-8"))["provenance"] for file in RESULTS[name]]
    about = json.loads((ROOT / "hub_cards" / f"{name}.json").read_text(encoding="utf-8"))
    parameters = AutoModel.from_pretrained(folder).num_parameters()
    num_rows = sum(record.get("rows", {}).values())  # read and left out, which a card adds up
    return [config, {**record, "curve": record["curve"][-1:]}, origins, about, parameters, num_rows]


def own_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    """File and row of each figure of the drafter `models/NAME`, which results call by the name of its folder."""
    found = []
    for file in RESULTS[name]:
        result = json.loads((RESULTS_FOLDER / file).read_text(encoding="utf-8"))
        found += [(file, row) for row in result["rows"] if row["method"] == name]
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_the_cards_are_what_the_files_give(name: str) -> None:
    assert (ROOT / "hub_cards" / f"{name}.md").read_text(encoding="utf-8") == render(name)


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_stands_in_a_results_file(name: str) -> None:
    card = (ROOT / "hub_cards" / f"{name}.md").read_text(encoding="utf-8")
    table = FIGURES.findall(card)
    expected = []
    for file, row in own_rows(name):
        rates = []
        for key in ("speedup", "acceptance_length_pooled"):
            low, high = row[f"{key}_interval"]
            rates.append(f"{row[key]:.2f} ({low:.2f} to {high:.2f})")
        texts = f"{row['num_identical']}/{row['num_compared']}"
        repeated = f"{100 * row['repetition_rate']:.0f} %"
        cells = [SET_NAMES[row["set"]], row["decoding"], *rates, repeated, texts, str(row["num_prompts"]), f"`{file}`"]
        expected.append(f"| {' | '.join(cells)} |")

    assert table == expected
    assert len(table) == NUM_ROWS.get(name, 6 * bool(RESULTS[name]))
    assert untraced(card, evidence_of(name)) == []


def test_a_typed_figure_is_found() -> None:
    card = (ROOT / "hub_cards/falcon-reference.md").read_text(encoding="utf-8")

    assert untraced(card.replace("3500 steps", "3600 steps"), evidence_of("falcon-reference")) == ["3600"]
    assert untraced(card.replace("0.765", "0.865"), evidence_of("falcon-reference")) == ["0.865"]


@pytest.mark.parametrize("name", RESULTS)
def test_the_metadata_agrees_with_the_files(name: str) -> None:
    card = ModelCard.load(ROOT / "hub_cards" / f"{name}.md")

    config = json.loads((ROOT / "models" / name / "config.json").read_text(encoding="utf-8"))
    assert card.data.base_model == config["target_name_or_path"]
    assert card.data["base_model_relation"] == "adapter"
    assert "speculative-decoding" in card.data.tags
    for _, row in own_rows(name):
        begin = f"| {SET_NAMES[row['set']]} | {row['decoding']} | {row['speedup']:.2f} "
        (line,) = [line for line in card.text.split("\n") if line.startswith(begin)]
        assert f"| {row['acceptance_length_pooled']:.2f} (" in line


def test_the_drafters_record_of_its_target_is_on_the_card() -> None:
    drafter = LookaheadDrafter.from_target(make_target())
    drafter.config.target_fingerprint = {"revision": "abc123", "dtype": "bfloat16", "template": "258015e0815376ab"}

    card = render_card(drafter, "a/b", "a/target")

    assert (
        "made for revision abc123 of the target in bfloat16, with the chat template of digest 258015e0815376ab" in card
    )
    assert "these arguments" not in card


def test_arguments_for_the_chat_template_and_rows_by_treatment_are_on_the_card() -> None:
    drafter = LookaheadDrafter.from_target(make_target())
    fingerprint = {
        "revision": None,
        "dtype": "bfloat16",
        "template": "25",
        "template_kwargs": {"enable_thinking": False},
    }
    drafter.config.target_fingerprint = fingerprint
    record = json.loads((ROOT / "models/falcon-reference/training.json").read_text(encoding="utf-8"))
    training = {**record, "num_examples": 12, "rows": {"whole": 6, "turn by turn": 3, "tools": 1}}

    card = render_card(drafter, "a/b", "a/target", records={"training.json": training})

    assert 'and these arguments for it: `{"enable_thinking": false}`' in card
    assert "10 rows: 6 whole (60%), 3 turn by turn (30%), 1 left out (10%: 1 tools); 12 examples, " in card


def test_a_card_shows_the_conditions_of_a_measurement(tmp_path: Path) -> None:
    drafter = AutoModel.from_pretrained(ROOT / "models/falcon-reference")
    result = json.loads((RESULTS_FOLDER / "speed.json").read_text(encoding="utf-8"))
    shown = {}
    for name, conditions in (
        ("whole", {"revision": "abc123", "template": "258015e0815376ab"}),
        ("folder", {"revision": None, "template": None}),
    ):
        methods = [{**method, "conditions": conditions} for method in result["methods"]]
        (tmp_path / f"{name}.json").write_text(json.dumps({**result, "methods": methods}), encoding="utf-8")
        figures = read_figures([tmp_path / f"{name}.json"], drafter)
        shown[name] = render_card(drafter, "a/b", "a/target", figures=figures)

    cells = {
        name: next(line for line in card.splitlines() if line.startswith(f"| `{name}.json`"))
        for name, card in shown.items()
    }
    assert "| abc123 | float32 | 258015e0815376ab |" in cells["whole"]
    assert "| none: a folder | float32 | none |" in cells["folder"]


def test_figures_of_another_drafter_are_refused(tmp_path: Path) -> None:
    other = FalconSpecDrafter.from_target(make_target())
    with pytest.raises(PublishError, match="but 0 of its 2 methods have its weights and settings"):
        read_figures([RESULTS_FOLDER / "speed.json"], other)

    retreed: Any = AutoModel.from_pretrained(ROOT / "models/falcon-reference")
    retreed.generation_config.draft_tree = DraftTree.chain(2).to_json()
    with pytest.raises(PublishError, match="but 0 of its"):
        read_figures([RESULTS_FOLDER / "speed.json"], retreed)


def test_a_card_without_figures_says_so() -> None:
    card = render_card(LookaheadDrafter.from_target(make_target()), "a/b", "a/target")

    assert "Nothing was measured of these weights" in card
    assert "Licence of the drafter: not stated." in card


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"licence": "mit"}',
        '{"data": [{"name": "x"}]}',
        '{"data": ["x"]}',
        '{"notes": "It never saw code."}',
    ],
    ids=range(6),
)
def test_facts_about_a_drafter_must_be_known_fields(content: str, tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text(content, encoding="utf-8")

    with pytest.raises(PublishError, match="must be a JSON object of `license`, `data`, `notes`"):
        About.read(tmp_path / "about.json")


def test_a_card_names_the_data_its_licences_and_further_limits() -> None:
    about = About("mit", [{"name": "talks of 2025", "licence": "cc-by-4.0"}], ["It never saw code."])

    card = render_card(
        LookaheadDrafter.from_target(make_target()), "a/b", "a/target", publication=Publication(about=about)
    )

    assert ModelCard(card).data.license == "mit"
    assert "Licence of the drafter: mit." in card
    assert "| talks of 2025 | cc-by-4.0 |" in card
    assert "- It never saw code." in card.partition("## What is not established")[2]


def test_training_of_other_software_is_refused() -> None:
    with pytest.raises(
        PublishError, match=r"`training.json` .* must be those of `falcon-spec train` .*, but KeyError: 'curve'"
    ):
        render_card(LookaheadDrafter.from_target(make_target()), "a/b", "a/target", records={"training.json": {}})
