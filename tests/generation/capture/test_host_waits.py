"""Where the host waits for a device is told by PyTorch's own warnings, thread by thread."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from tests.fake_cuda import FakeGraph, fake_cuda
from transformers_falcon_spec.generation.capture import graph

__all__ = ["fake_cuda"]


@pytest.fixture
def _casts_warn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An operation of which PyTorch warns on a CPU, from the same place in C++, stands for one that waits."""
    monkeypatch.setattr(graph, "_WARNING", "Casting complex values to real")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def warned() -> None:
    torch.zeros(2, dtype=torch.complex64).to(torch.float32)


@pytest.mark.usefixtures("_casts_warn")
def test_a_warning_of_pytorch_is_found_with_its_line_in_this_thread_alone(fake_cuda: type[FakeGraph]) -> None:
    def elsewhere() -> None:
        torch.ones(2, dtype=torch.complex64).to(torch.float32)

    line = warned.__code__.co_firstlineno + 1
    other = threading.Thread(target=elsewhere)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with graph.host_waits() as places:
            warned()
            warned()
            other.start()
            other.join()
            warnings.warn("another", stacklevel=1)

    assert list(places) == [f"capture/test_host_waits.py:{line}"]
    assert [str(each.message) for each in shown] == ["another"]


def test_the_detector_is_set_for_the_block_and_then_as_it_was(fake_cuda: type[FakeGraph]) -> None:
    fake_cuda.sync_debug_mode = 2
    show = warnings.showwarning

    modes = []
    with suppress(ValueError), graph.host_waits():
        modes.append(fake_cuda.sync_debug_mode)
        raise ValueError

    assert (modes, fake_cuda.sync_debug_mode, warnings.showwarning) == ([1], 2, show)
