"""Reads are captured with fused norms where these fit; the target keeps its own, and its text."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.pretend.device import cuda, to_device
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.generation.capture import norms
from transformers_falcon_spec.generation.capture.norms import FusedNorm

__all__ = ["cuda", "fake_cuda"]
pytestmark = [pytest.mark.families, pytest.mark.pretend]


def _parts(target: Any) -> list[Any]:
    """All that a target is made of, as far as it may be told apart."""
    names = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
    return [
        (id(part), type(part), {**vars(part)}, *({**vars(part)[name]} for name in names)) for part in target.modules()
    ]


def _known_texts(cuda: type[FakeGraph], target: Any) -> list[Any]:
    """Two captured calls whose drafts are kept: what they give, after it was found to be the target's own text."""
    prompt = make_prompt()
    plain = runs.plain(target, prompt).sequences
    knowing = InformedDrafter(RandomDrafter(tune=False), plain)
    knowing.generation_config.capture = True
    target, knowing, prompt = map(to_device, (target, knowing, prompt))
    before = _parts(target)

    outputs = [runs.drafted(target, knowing, prompt) for _ in range(2)]

    assert [output.sequences.tolist() for output in outputs] == [plain.tolist()] * 2
    assert outputs[1].speculation.acceptance_length > 1.5
    assert "capture begins" in cuda.log
    assert _parts(target) == before
    return outputs


@pytest.mark.parametrize(
    ("family", "dtype", "is_fused"),
    [
        ("llama", torch.float32, True),
        ("qwen3", torch.bfloat16, True),
        ("gemma2", torch.bfloat16, False),
        ("qwen3_moe", torch.bfloat16, False),
    ],
)
def test_captures_have_fused_norms_where_these_fit(
    cuda: type[FakeGraph], family: str, dtype: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[FakeGraph | None] = []  # the graphs that are recorded while a fused norm is called
    forward = FusedNorm.forward

    def noted(self: FusedNorm, states: Any) -> Any:
        found.append(cuda.capturing)
        return forward(self, states)

    target = make_target(family).to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(FusedNorm, "forward", noted)
        outputs = _known_texts(cuda, target)

    is_in_warm_up, is_in_capture = None in found, any(graph is not None for graph in found)
    assert (is_in_warm_up, is_in_capture) == (is_fused, is_fused)
    assert [len(output.speculation.notes) for output in outputs] == [1, 1]  # that such drafts are not captured


def test_a_norm_that_is_wrong_on_this_device_writes_no_text(
    cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "_FITS", {})
    forward = FusedNorm.forward
    monkeypatch.setattr(FusedNorm, "forward", lambda norm, states: 1.01 * forward(norm, states))

    _known_texts(cuda, make_target())

    assert [*norms._FITS.values()] == [False]


def test_a_capture_that_fails_leaves_the_norms_alone(cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_self: FusedNorm, _states: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(FusedNorm, "forward", failing)

    monkeypatch.setattr(norms, "fits", lambda _norm: True)
    monkeypatch.setattr(norms, "_FITS", {})

    outputs = _known_texts(cuda, make_target())

    assert all("could not be captured and ran without: planted" in str(output.speculation.notes) for output in outputs)
