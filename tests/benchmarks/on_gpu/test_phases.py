"""Work is timed by phase, as a device would be asked."""

import torch

from benchmarks.on_gpu import phases
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec.generation.capture.graph import RepeatedWork
from transformers_falcon_spec.generation.timed import timed_generate

__all__ = ["fake_cuda"]
CPU = torch.device("cpu")


def test_work_is_timed_by_phase_and_captures_are_no_part_of_it(fake_cuda: type[FakeGraph]) -> None:
    work, tensor = RepeatedWork(CPU), torch.zeros(2)

    def read() -> None:
        tensor.add_(1)

    with phases.watched_work(torch.device("cuda")) as watch:
        for _ in range(3):
            work.run(read)
    work.run(read)

    assert (watch.num_captures, [phase for phase, _, _ in watch.marks], list(watch.seconds())) == (
        1,
        ["read"] * 2,
        ["read"],
    )
    assert tensor.tolist() == [6.0, 6.0]  # two of them to warm up


def test_work_that_could_not_be_captured_is_told_of(fake_cuda: type[FakeGraph]) -> None:
    with phases.watched_work(torch.device("cuda")) as watch:
        RepeatedWork(CPU).run(fake_cuda.wait)
        RepeatedWork(CPU).run(lambda: None)

    assert len(watch.uncaptured) == 1


def test_every_piece_of_a_captured_step_belongs_to_a_phase(fake_cuda: type[FakeGraph]) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.capture = True

    with phases.watched_work(torch.device("cuda")) as watch:
        for seed in range(2):
            timed_generate(target, prompt, 8, {"do_sample": True}, seed, drafter)

    assert set(watch.seconds()) == {"draft", "read", "accept"}
