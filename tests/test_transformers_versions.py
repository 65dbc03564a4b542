"""What differs between versions of Transformers has one home, and a version that nobody tested is told of."""

import logging
import re
from pathlib import Path

import pytest
import transformers
from transformers import LlamaForCausalLM

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import make_target
from transformers_falcon_spec import transformers_versions
from transformers_falcon_spec.transformers_versions import (
    CACHE,
    INSTALLED,
    NEWEST_TESTED,
    cache_name,
    warn_if_untested,
)

ROOT = Path(__file__).parents[1]


def test_the_requirement_ends_with_the_newest_tested_version() -> None:
    bound = re.search(r'"transformers>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())

    assert bound is not None
    major, minor = NEWEST_TESTED
    assert tuple(map(int, bound.groups())) == (major, minor + 1)


def test_the_constraints_hold_the_newest_tested_version() -> None:
    pinned = re.search(r"^transformers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert pinned is not None
    assert tuple(map(int, pinned.groups())) == NEWEST_TESTED


def test_only_this_module_looks_at_the_version_of_transformers() -> None:
    source = ROOT / "src" / "transformers_falcon_spec"
    lookers = [path.name for path in source.rglob("*.py") if "transformers.__version__" in path.read_text()]

    assert lookers == ["transformers_versions.py"]


def test_a_call_on_a_newer_version_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_versions, "INSTALLED", (NEWEST_TESTED[0], NEWEST_TESTED[1] + 1))
    warn_if_untested.cache_clear()
    target = make_target()

    with caplog.at_level(logging.WARNING):
        runs.drafted(target, RandomDrafter())
        runs.drafted(target, RandomDrafter())
    warn_if_untested.cache_clear()

    told = [record.getMessage() for record in caplog.records if "newest version" in record.getMessage()]
    assert told == [
        f"Transformers {transformers.__version__} is newer than 5.24, the newest version that this package was tested "
        "with. If a call fails, run `pip install transformers==5.24.*`, and report it."
    ]


def test_the_name_of_the_cache_is_the_one_that_the_installed_forwards_take() -> None:
    assert cache_name(LlamaForCausalLM.forward) == CACHE
    assert (CACHE == "cache") == (INSTALLED >= (5, 24))


def test_code_that_keeps_the_old_name_is_called_by_it() -> None:
    def forward(input_ids: object, past_key_values: object = None) -> None: ...

    assert cache_name(forward) == "past_key_values"
