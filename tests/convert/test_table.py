"""The tables of `docs/convert.md`, row by row: what a format becomes, needs, drafts, differs by and is exported to."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import runs
from tests.batches import batch_and_drafted
from transformers_falcon_spec import DiffusionDrafter, DraftTree, SpeculationConfig, load_drafter
from transformers_falcon_spec.convert import FORMATS, convert_checkpoint, export_drafter
from transformers_falcon_spec.convert.conversion import conversion_of
from transformers_falcon_spec.convert.export import ExportFormat
from transformers_falcon_spec.errors import CheckpointError, OptionError

from .table_rows import ROWS, SILENT

PAGE = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
TREE = {"parents": [-1, 0, 0, 1, 1], "ranks": [-1, 0, 1, 0, 1]}
SPREAD = 3  # processors add up in other orders
LEAST = 1e-6  # of forwards in double precision, whose logits are rounded at the end


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading of the page, by their first cells."""
    section = PAGE.partition(f"\n## {heading}\n")[2]
    lines = re.search(r"(^\|.*\|\n)+", section, flags=re.MULTILINE)
    assert lines is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


CONVERTED, ESTABLISHED = table("What is converted"), table("What is established")


@pytest.fixture(autouse=True)
def own_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def test_every_row_is_tested() -> None:
    assert (CONVERTED.keys(), ESTABLISHED.keys()) == (SILENT.keys(), ROWS.keys())
    assert "Every format loads, and drafts chains, trees and for batches." in PAGE  # what the next test tries


@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_a_row_loads_and_drafts_chains_and_trees_and_for_batches(name: str, tmp_path: Path) -> None:
    target = ROWS[name].target(tmp_path)

    for number, source in enumerate(ROWS[name].sources):
        drafter: Any = load_drafter(source(tmp_path / str(number)), target)
        is_diffusion = isinstance(drafter, DiffusionDrafter)
        _draft(drafter, DraftTree.chain(2).to_json(), "cps")
        chain = runs.both(target, drafter)
        _draft(drafter, TREE, "tree")
        tree, rows = runs.informed(target, drafter), _rows_read_at_once(drafter)
        batch = batch_and_drafted(target, drafter)

        for pair in (chain, tree, batch):
            pair.assert_equal(is_kept=False)
        assert is_diffusion or 0 < chain.stats.num_drafted <= 2 * chain.stats.num_steps
        assert min(chain.stats.num_drafted, tree.stats.num_drafted - tree.stats.num_steps, batch.stats.num_drafted) > 0
        assert not is_diffusion or rows == {4}  # all of the batch in one pass
        assert conversion_of(drafter)["format"] in {table.name for table in FORMATS}


def _draft(drafter: Any, tree: Any, search: str) -> None:
    """From now on the drafter drafts in this form, always."""
    drafter.generation_config = SpeculationConfig(tune=False)
    if isinstance(drafter, DiffusionDrafter):
        drafter.config.search = search
    else:
        drafter.generation_config.draft_tree = tree


def _rows_read_at_once(drafter: Any) -> set[int]:
    """How many rows a wrapped model reads in each of its coming passes."""
    found: set[int] = set()
    if isinstance(drafter, DiffusionDrafter):
        drafter.model.get_input_embeddings().register_forward_hook(lambda _module, ids, _out: found.add(len(ids[0])))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_forward_differs_from_its_reference_by_no_more_than_the_row_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, compare = [0.0], torch.testing.assert_close
    stated = max(float(number) for number in re.findall(r"\d\.\d(?:e-\d)?(?![\d.])", ESTABLISHED[name][0]))

    def measured(actual: Tensor, expected: Tensor, **bounds: Any) -> None:
        found.append(float((actual - expected).abs().max()))
        compare(actual, expected, **bounds)

    monkeypatch.setattr(torch.testing, "assert_close", measured)
    for number, check in enumerate(ROWS[name].forwards):
        torch.manual_seed(0)
        check(tmp_path / str(number))

    assert len(found) > 1
    assert max(found) <= max(SPREAD * stated, LEAST)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_exported_to_what_it_names_and_to_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = ROWS[name].target(Path())
    found = set()

    for number, source in enumerate(ROWS[name].sources):
        written = source(Path(f"source-{number}"))
        if name.startswith(("Eagle", "Falcon")):
            give_embeddings_of_target(written, target)
        convert_checkpoint(written, f"own-{number}", "target")
        for form in get_args(ExportFormat):
            try:
                export_drafter(f"own-{number}", f"{form}-{number}", form)
            except OptionError:
                continue
            found.add(form)

    assert found == set(re.findall(r"`(\w+)`", ESTABLISHED[name][1]))


def give_embeddings_of_target(source: Path, target: Any) -> None:
    """Published embeddings are copies of the target's; those that are not have no place in what is exported."""
    path = source / "model.safetensors"
    weights = load_file(path)
    if "embed_tokens.weight" in weights:
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().float().clone()
        save_file(weights, path)


@pytest.mark.parametrize("name", SILENT)
def test_a_format_becomes_and_needs_what_its_row_says(name: str, tmp_path: Path) -> None:
    until = list(CONVERTED.values())[: list(CONVERTED).index(name) + 1]
    becomes, needs = (
        [row[column] for row in until if not row[column].startswith("the same")][-1] for column in (1, 2)
    )
    make, row = SILENT[name]
    source = make(tmp_path / "source")

    if needs in ("", "special ids, if wanted"):
        convert_checkpoint(source, tmp_path / "own")
    else:
        with pytest.raises(CheckpointError, match=r"A conversion must know .* `--target NAME`"):
            convert_checkpoint(source, tmp_path / "own")

    drafter = load_drafter(source, ROWS[row].target(tmp_path))
    assert becomes.startswith(f"`{type(drafter).__name__}`")
