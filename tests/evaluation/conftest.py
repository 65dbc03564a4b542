"""Loading metrics as a user does, with all that `evaluate` stores in a folder of the test run."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

collect_ignore = ["browser.py"]  # run by another Python, which has Chromium


@pytest.fixture(scope="session")
def load_metric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """`evaluate.load` on the folder of a metric of this package."""
    import evaluate  # noqa: PLC0415  late: it must not precede the shape checks

    from transformers_falcon_spec.evaluation.metrics import metric_path  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        yield lambda name: evaluate.load(metric_path(name), keep_in_memory=True)
