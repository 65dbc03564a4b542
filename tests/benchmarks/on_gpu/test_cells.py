"""Cells are ordered by value, and none is left out."""

from dataclasses import replace

from benchmarks.on_gpu.cells import (
    EAGER,
    EMBEDDED,
    PLAIN,
    PLAIN_COMPILED,
    RANDOM,
    Way,
    cells,
    cells_of,
)
from benchmarks.on_gpu.goals import ORACLE


def test_the_first_cells_are_the_plains_and_falcon_three_ways_at_7b() -> None:
    first, second, *_ = cells()

    assert [(cell.shape, cell.rows, cell.decoding) for cell in (first, second)] == [
        ("7b", 1, "greedy"),
        ("7b", 1, "temperature-1"),
    ]
    for cell in (first, second):
        assert {PLAIN, PLAIN_COMPILED, Way(EAGER)} < set(cell.ways)
        assert {(way.captures, way.compiles) for way in cell.ways if way.who == EMBEDDED} == {
            (False, False),
            (True, False),
            (True, True),
        }


def test_names_of_cells_and_of_ways_are_their_own() -> None:
    found = [*cells()]

    assert len({cell.name for cell in found}) == len(found)
    assert all(len({way.name for way in cell.ways}) == len(cell.ways) for cell in found)


def test_every_goal_of_a_ratio_names_a_way_of_its_cell() -> None:
    named = {(cell.name, way.name) for cell in cells() for way in cell.ways}
    wanted = {("batch 8", f"{EMBEDDED}, captured"), ("random drafter", f"{RANDOM}, captured"), ("oracle", ORACLE.name)}

    assert wanted < named


def test_on_a_cpu_nothing_is_compiled_and_every_way_runs_once() -> None:
    of_cpu, of_cuda = ({cell.name: cell for cell in cells_of(device, "0.3b")} for device in ("cpu", "cuda"))

    for name, cell in of_cpu.items():
        assert len(set(cell.ways)) == len(cell.ways)
        assert set(cell.ways) == {replace(way, compiles=False) for way in of_cuda[name].ways}
    assert of_cuda.keys() == of_cpu.keys()
