"""What every test shares. It must not import the package: the shape checks hook into the first import, which comes later."""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isfunction, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch

from tests import probed
from tests.clock import LOOP, PLAN, HandClock, give
from tests.families import FAMILIES, ONE_OF_EACH

TESTS = Path(__file__).parent
MEASURING = {"benchmarks", "commands", "evaluation", "examples", "hub", "lab", "training"}  # folders of tests
# The lanes of whole folders. A file or a test of another lane carries its mark itself; all that has no mark is `unit`.
FOLDERS = {"benchmarks": "benchmarks", "evaluation": "benchmarks", "commands": "commands", "convert": "commands"}
FOLDERS |= {"examples": "docs", "hub": "commands", "lab": "benchmarks", "serve": "commands"}
FOLDERS |= {"trials": "families"}
LANES = {"unit", "families", "training", "commands", "benchmarks", "docs"}
GPU = "gpu"
ON_REQUEST = (
    "slow",
    GPU,
    "pretend",
    "hub",
    "grammar",
    "quantized",
    "speculators",
    "browser",
    "ray",
    "harness",
    "rollouts",
    "site",
)  # marks that `-m` must name
# What is checked at run time against the shapes of its annotations.
SHAPED = [
    "transformers_falcon_spec.core",
    "transformers_falcon_spec.training.objectives.glancing",
    "transformers_falcon_spec.training.losses",
]
# Classes whose methods are checked, in files where configurations refuse wrong fields in words of their own.
SHAPED_CLASSES = {
    "transformers_falcon_spec.drafters.eagle": ["EagleDrafter"],
    "transformers_falcon_spec.drafters.falcon": ["BlockAttention", "FalconSpecDrafter", "Transition"],
}
SHAPES_CHECKED = {"core", "drafters", "training", "trials"}  # folders of tests
HAS_CHECKER = find_spec("beartype") is not None  # a machine with a GPU may lack it
if HAS_CHECKER:
    jaxtyping.install_import_hook(SHAPED, "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by huggingface_hub when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.accelerator.is_available():
    # `torch.manual_seed` would keep the seed for a device that may come, each time with the stack as text: 0.7 ms in a test.
    for _device in (torch.cuda, torch.xpu, torch.mtia):
        _device.manual_seed_all = lambda _seed: None
DATA_CACHE = tempfile.TemporaryDirectory(prefix="datasets-")
os.environ.setdefault("HF_DATASETS_CACHE", DATA_CACHE.name)  # for what tests encode, also in processes of their own


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fixed` decodes every call that allows it in fixed shapes, `--taped` also repeats the work as a captured graph does."""
    for name in ("--fixed", "--taped"):
        parser.addoption(name, action="store_true", help="decode in fixed shapes wherever a call allows it")


def pytest_configure(config: pytest.Config) -> None:
    """A run leaves out what takes long or needs more than this environment, unless `-m` names it."""
    asked = config.option.markexpr
    left_out = [f"not {mark}" for mark in ON_REQUEST if mark not in asked]
    config.option.markexpr = " and ".join([*([f"({asked})"] if asked else []), *left_out])
    config.option.doctestmodules = config.option.doctestmodules and asked != GPU
    if HAS_CHECKER:
        _check_shapes_of_classes()


def _check_shapes_of_classes() -> None:
    from beartype import beartype  # noqa: PLC0415  a machine with a GPU may lack it

    for module, names in SHAPED_CLASSES.items():
        for name in names:
            kind = getattr(import_module(module), name)
            methods = {key: part for key, part in vars(kind).items() if isfunction(part)}
            for key, method in methods.items():
                setattr(kind, key, jaxtyping.jaxtyped(method, typechecker=beartype))


def pytest_report_header() -> str | None:
    """A run without the checker of shapes says so."""
    return None if HAS_CHECKER else "shapes are not checked: `beartype` is not installed"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports the files alone that hold such tests: a machine with a GPU may lack what others need."""
    if not config.option.markexpr.startswith(f"({GPU})") or not collection_path.name.startswith("test_"):
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test is in one lane."""
    for item in items:
        if not LANES & {mark.name for mark in item.iter_markers()}:
            item.add_marker(_lane(item))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it.

    Each training calls the collector three times before it frees a device's memory, which is none here: 3 % of all tests.
    """
    gc.collect()
    gc.freeze()
    memory: Any = sys.modules.get("accelerate.utils.memory")
    if memory is not None and not torch.accelerator.is_available():
        memory.gc = SimpleNamespace(collect=lambda: 0)


def _lane(item: pytest.Item) -> str:
    """The lane of a test that carries no mark of one."""
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
    return FOLDERS.get(folder, "families" if family in FAMILIES.keys() - ONE_OF_EACH.keys() else "unit")


@pytest.fixture(autouse=True)
def _shape_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shapes are checked where algorithms are tested, and in random trials: elsewhere the same functions are called again."""
    is_off = jaxtyping.config.jaxtyping_disable
    folder = request.path.relative_to(TESTS).parts[0] if request.path.is_relative_to(TESTS) else "core"
    is_of_lane = {"unit", "training"} & {mark.name for mark in request.node.iter_markers()}
    if folder not in (SHAPES_CHECKED if is_of_lane else {"trials"}):
        jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", is_off)


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    """Every test starts from the same global random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    """A script that sets its threads leaves them to itself: with more than a process has cores, each product waits for the others."""
    num_threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The time in every call with a drafter: the tuner is on, as users have it, and what it chooses does not hang on the machine.

    Tests that measure have the machine's own clock, and no tuner unless they ask for `machine_clock`.
    """
    clock = HandClock()
    measures = request.path.relative_to(TESTS).parts[0] in MEASURING
    if LOOP in sys.modules and not measures:
        clock.install(monkeypatch)
    elif LOOP in sys.modules and "machine_clock" not in request.fixturenames:
        monkeypatch.setattr("transformers_falcon_spec.generation.tuning.cost_model_of", lambda *_: None)
    return clock


@pytest.fixture(autouse=True)
def _known_targets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock targets that are equal are probed once; a test that replaces parts of Transformers or of the package probes anew.

    So do trials, some of which break the package.
    """
    if probed.PROBE in sys.modules and not _replaces_parts(request.node):
        module: Any = sys.modules[probed.PROBE]
        monkeypatch.setattr(module, "_probe", probed.known(module._probe))


def _replaces_parts(item: pytest.Item) -> bool:
    is_trial = item.path.is_relative_to(TESTS / "trials")
    return is_trial or (isinstance(item, pytest.Function) and "monkeypatch" in signature(item.function).parameters)


@pytest.fixture
def no_shape_checks() -> Iterator[None]:
    """For thousands of calls of the same few functions: checking shapes takes most of their time; shorter tests check them."""
    is_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", is_off)


@pytest.fixture(autouse=True)
def _fixed_shapes(request: pytest.FixtureRequest, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that leave it to the package decode in fixed shapes, as captured ones do, if the command line asks for it."""
    is_taped = request.config.getoption("--taped")
    if LOOP not in sys.modules or not (is_taped or request.config.getoption("--fixed")):
        return
    if not request.path.is_relative_to(TESTS / "generation" / "capture"):  # those choose it themselves
        monkeypatch.setattr(f"{PLAN}.is_wanted", lambda capture, _device: capture is not False)
        # What the tests say of notes holds for uncaptured steps.
        monkeypatch.setattr(f"{PLAN}.notes_of_uncaptured", lambda *_: [])
        decoding = sys.modules[LOOP].SpeculativeDecoding
        move_text = decoding._move_text

        def moved_without_notes(self: Any, num_logits: int) -> None:
            notes = list(self.stats.notes)
            move_text(self, num_logits)
            self.stats.notes[:] = notes

        monkeypatch.setattr(decoding, "_move_text", moved_without_notes)
    if is_taped:
        from tests import tape  # noqa: PLC0415  it imports the package

        tape.install(monkeypatch)


@pytest.fixture
def machine_clock(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock and a tuner, for tests of what is measured and of what readers run."""
    if LOOP in sys.modules:
        give(monkeypatch, time.perf_counter)
