"""`trees`, and seeing trees in `generate`, through the command line."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_drafter
from transformers_falcon_spec import DraftTree, FalconSpecDrafter, LookaheadDrafter, cli
from transformers_falcon_spec.commands.loading import load_tree
from transformers_falcon_spec.drafters.falcon import paper_tree
from transformers_falcon_spec.errors import DraftTreeError, PublishError
from transformers_falcon_spec.hub.card import read_figures

pytestmark = pytest.mark.benchmarks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, drafters of three kinds, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_target(folder / "target", max_position_embeddings=128)
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    make_drafter(target, block_size=2).save_pretrained(folder / "falcon")
    make_eagle(target, "eagle-1").save_pretrained(folder / "eagle")
    make_medusa(target, num_heads=2).save_pretrained(folder / "medusa")
    LookaheadDrafter.from_target(target).save_pretrained(folder / "lookahead")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8")
    return folder


def fit(models: Path, *options: str, kind: str = "falcon", nodes: str = "6") -> int:
    common = ["--target", str(models / "target"), "--drafter", str(models / kind), "--nodes", nodes]
    prompts = [] if "--prompts" in options else ["--prompts", str(models / "sums.jsonl")]
    return cli.main(["trees", *common, *prompts, "--max_new_tokens", "12", *options])


def test_a_fit_goes_on_where_it_stopped_and_finds_the_same_tree(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tree.json"
    assert fit(models, "--output", str(output)) == 0
    result, records = json.loads(output.read_text(encoding="utf-8")), output.with_suffix(".jsonl")
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2  # settings; two prompts under two decodings
    records.write_text("".join(lines[:3]), encoding="utf-8")
    output.unlink()

    assert fit(models, "--output", str(output)) == 0

    again = json.loads(output.read_text(encoding="utf-8"))
    assert records.read_text(encoding="utf-8").splitlines(keepends=True) == lines
    assert {**again, "provenance": None} == {**result, "provenance": None}
    assert len(load_tree(str(output))) == 6
    assert sum(result["num_asked"]) > 0
    assert f"6 nodes, expected acceptance length {result['expected_acceptance_length']:.2f}" in capsys.readouterr().out
    assert fit(models, "--output", str(output), "--seed", "1") == 1  # measured otherwise
    assert "must hold measurements under the same settings" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "depth"), [("falcon", 4), ("eagle", 2), ("medusa", 2)])
def test_a_saved_tree_becomes_the_drafters_own(
    models: Path, kind: str, depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models / kind, tmp_path / kind)
    drafter = str(tmp_path / kind)
    passes = [] if kind == "medusa" else ["--passes", "2"]

    output = ["--output", str(tmp_path / kind / "draft_tree.json")]
    status = fit(models, "--drafter", drafter, "--save", *output, *passes, "--decodings", "greedy", nodes="9")

    result = json.loads((tmp_path / kind / "draft_tree.json").read_text(encoding="utf-8"))
    assert status == 0
    assert load_tree(f"{drafter}/config.json").to_json() == result["draft_tree"]
    assert len(load_tree(f"{drafter}/config.json")) == 9
    assert (len(result["acceptance"]), len(result["acceptance"][0])) == (depth, 10)
    assert ("This drafter grows its trees" in capsys.readouterr().out) == (kind == "eagle")


def test_a_saved_tree_takes_the_place_of_that_of_the_generation_options(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "falcon"
    drafter = FalconSpecDrafter.from_pretrained(models / "falcon")
    drafter.generation_config.draft_tree = DraftTree.chain(2).to_json()
    drafter.save_pretrained(folder)

    fit(models, "--drafter", str(folder), "--save", "--output", str(tmp_path / "tree.json"), "--decodings", "greedy")

    assert len(FalconSpecDrafter.from_pretrained(folder).draft_tree) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0", "--output", "t.json"], "`nodes` must be at least 2, but it is 0."),
        (["--nodes", "-4", "--output", "t.json"], "`nodes` must be at least 2, but it is -4."),
        (["--output", "tree.txt"], "`output` must end in `.json`, but it is `tree.txt`"),
        (["--output", "t.json", "--decodings", "hot"], "`decodings` must be some of"),
        (["--output", "t.json", "--limit", "0"], "`limit` must be at least 1, but it is 0"),
        (
            ["--drafter", "someone/drafter", "--save", "--output", "t.json"],
            "`drafter` must be a folder that holds one",
        ),
        (["--output", "t.json", "--max_new_tokens", "126"], "must fit into the target's context of 128"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_of_a_fit_are_refused_in_words(
    models: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(models, *options) == 1

    assert message in capsys.readouterr().err


def test_the_papers_tree_has_its_shape() -> None:
    tree = load_tree("paper")

    depths = tree.depths[0].tolist()
    assert [depths.count(depth) for depth in range(1, 9)] == [20, 19, 19, 15, 16, 10, 10, 9]
    assert tree.parents[0].tolist().count(0) == 20
    assert len(tree) == 119


def test_a_drafter_takes_the_papers_tree(models: Path) -> None:
    drafter = FalconSpecDrafter.from_pretrained(models / "falcon")

    drafter.generation_config.draft_tree = paper_tree().to_json()

    assert drafter.num_nodes == 119


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tree.json` must be a JSON file of a tree, as `falcon-spec trees` writes it, or `paper`, but it"),
        ("{", "tree.json` must be a JSON file of a tree"),
        ("[1]", "A stored tree must be an object with `parents` and `ranks`"),
        ('{"num_nodes": 3}', "A stored tree must be an object with `parents` and `ranks`"),
        ('{"parents": [-1, 0, 0], "ranks": [-1, 1, 1]}', "node 0 has two children of rank 1"),
        ('{"draft_tree": {"parents": [-1, 0, 3], "ranks": [-1, 0, 0]}}', "Node 2 must come after its parent"),
        ('{"parents": [-1, 0], "ranks": [-1, -2]}', "0 or more elsewhere"),
    ],
)
def test_files_that_hold_no_tree_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(DraftTreeError, match=re.escape(message)):
        load_tree(str(path))


def test_generate_shows_the_tree_of_each_step(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--target", str(models / "target"), "--drafter", str(models / "falcon"), "--prompt", "one"]

    assert cli.main([*common, "--max_new_tokens", "8", "--show_tree"]) == 0

    out = capsys.readouterr().out
    assert "Step 1: " in out
    assert re.search(r"└── [✓·] '.*'", out)
    assert out.count("drafted nodes kept") > 1


def write_tree(path: Path, tree: DraftTree) -> str:
    path.write_text(json.dumps({"draft_tree": tree.to_json(), "nodes": len(tree)}), encoding="utf-8")  # as `trees`
    return str(path)


def test_a_tree_from_a_file_is_drafted_measured_and_recorded(models: Path, tmp_path: Path) -> None:
    chain = DraftTree.chain(5)
    common = ["--prompts", str(models / "sums.jsonl"), "--draft_tree", write_tree(tmp_path / "tree.json", chain)]
    methods = ["--methods", str(models / "falcon"), "prompt-lookup", "--target", str(models / "target")]
    files = ["--output", str(tmp_path / "speed.json"), "--max_new_tokens", "8"]

    assert cli.main(["bench", *methods, *common, *files, "--decodings", "greedy"]) == 0

    result = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    entries = {entry["method"]: entry for entry in result["methods"]}
    assert (entries["falcon"]["settings"], entries["falcon"]["num_nodes"]) == ({"draft_tree": chain.to_json()}, 6)
    assert entries["prompt-lookup"]["num_nodes"] == 11
    assert result["provenance"]["draft_tree"].endswith("tree.json")
    drafter = FalconSpecDrafter.from_pretrained(models / "falcon")
    with pytest.raises(PublishError, match="but 0 of its 3 methods have its weights and settings"):
        read_figures([tmp_path / "speed.json"], drafter)  # figures of another tree are not the drafter's own
    drafter.generation_config.draft_tree = chain.to_json()
    assert len(read_figures([tmp_path / "speed.json"], drafter)) == 1


def test_parity_is_checked_with_a_tree_from_a_file_and_goes_on_with_no_other(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", str(models / "target"), "--drafter", str(models / "falcon"), "--max_new_tokens", "8"]
    common = ["parity", *pair, "--prompts", str(models / "sums.jsonl"), "--output", str(tmp_path / "parity.json")]

    tree = ["--draft_tree", write_tree(tmp_path / "tree.json", DraftTree.chain(5))]
    assert cli.main([*common, *tree]) == 0
    assert cli.main(common) == 1  # the results of both would be one

    report = json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))
    assert report["rows"][0]["identical"] == 2
    assert report["provenance"]["draft_tree"].endswith("tree.json")
    assert "must hold measurements under the same settings" in capsys.readouterr().err


def test_text_is_written_with_a_tree_from_a_file(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", str(models / "target"), "--drafter", str(models / "falcon")]
    tree = ["--draft_tree", write_tree(tmp_path / "tree.json", DraftTree.from_lists([-1, 0, 0, 1, 3]))]

    status = cli.main(["generate", *pair, *tree, "--prompt", "one plus two", "--max_new_tokens", "8", "--show_tree"])

    assert status == 0
    assert "4 drafted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "tree", "message"),
    [
        ("falcon", None, "no-tree.json` must be a JSON file of a tree"),
        (
            "medusa",
            DraftTree.chain(3),
            "so trees must end at depth 2, but `draft_tree` or `tree_depth` reaches depth 3",
        ),
        ("falcon", DraftTree.chain(128), "up to 129 nodes and reach depth 128"),
        ("lookahead", DraftTree.chain(2), "must be given to drafters that draft static trees, but"),
    ],
    ids=["no file", "deeper than heads", "beyond the context", "no static trees"],
)
@pytest.mark.parametrize("command", ["generate", "parity", "bench"])
def test_a_tree_that_cannot_be_drafted_is_refused_before_anything_is_written(
    models: Path,
    tmp_path: Path,
    command: str,
    kind: str,
    tree: DraftTree | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "no-tree.json"
    given = ["--draft_tree", str(path) if tree is None else write_tree(path, tree), "--max_new_tokens", "8"]
    pair = ["--target", str(models / "target"), "--drafter", str(models / kind)]
    if command == "bench":
        pair = ["--target", str(models / "target"), "--methods", str(models / kind)]
    files = [] if command == "generate" else ["--output", str(tmp_path / "out.json")]

    status = cli.main([command, *pair, *given, *files, "--prompts", str(models / "sums.jsonl")])

    assert status == 1
    assert message in capsys.readouterr().err
