"""Targets with quantised weights are captured whole on a device with CUDA's rules, and their texts are those of the target alone."""

import pytest

from tests import quantized, runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import every_drafter
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.pretend.device import cuda, to_device
from tests.tiny import make_prompt

__all__ = ["cuda", "fake_cuda"]
pytestmark = [pytest.mark.families, pytest.mark.quantized]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4, scales quantised too", "torchao", "gptq"])
def test_a_quantised_target_is_captured_whole(cuda: type[FakeGraph], kind: str) -> None:
    target, prompt = quantized.loaded(kind), make_prompt()
    drafter = every_drafter("falcon", target)
    drafter.generation_config.capture = True
    target, drafter, prompt = map(to_device, (target, drafter, prompt))
    plain = runs.plain(target, prompt).sequences
    knowing = InformedDrafter(RandomDrafter(), plain)
    knowing.generation_config.capture = True

    outputs = [runs.drafted(target, drafter, prompt) for _ in range(2)]
    kept = runs.drafted(target, knowing, prompt)

    assert [output.sequences.tolist() for output in (*outputs, kept)] == [plain.tolist()] * 3
    assert all(output.speculation.num_drafted > 0 for output in outputs)
    assert kept.speculation.acceptance_length > 1.5
    assert not [note for note in outputs[1].speculation.notes if "could not be captured" in note]
    assert "capture begins" in cuda.log


def test_kernels_that_ask_the_host_read_uncaptured_and_are_named(cuda: type[FakeGraph]) -> None:
    target, prompt = quantized.loaded("awq"), make_prompt()
    drafter = every_drafter("falcon", target)
    drafter.generation_config.capture = "auto"
    target, drafter, prompt = map(to_device, (target, drafter, prompt))
    plain = runs.plain(target, prompt).sequences

    output = runs.drafted(target, drafter, prompt)

    assert output.sequences.tolist() == plain.tolist()
    assert output.speculation.num_drafted > 0
    assert any("quantised by GPTQModel's AwqTorchLinear, whose" in note for note in output.speculation.notes)
    assert "capture begins" not in cuda.log
