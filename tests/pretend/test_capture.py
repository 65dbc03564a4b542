"""Every drafter's step is captured whole on a device with CUDA's rules: nothing asks the host, and the text is the target's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.on_gpu.phases import PHASES, phase_of
from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import KINDS, every_drafter
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.families import RECURRENT
from tests.generation.capture.test_captured import assert_a_step_waits_once
from tests.generation.tuning.test_tuned_text import Fickle
from tests.pairs import in_turn
from tests.pretend.device import Pretend, cuda, device, to_device
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.evaluation.doctor import Report, check_capture
from transformers_falcon_spec.generation import tuning
from transformers_falcon_spec.generation.capture import norms, state
from transformers_falcon_spec.generation.capture.graph import JoinedPieces, Proof, RepeatedWork
from transformers_falcon_spec.generation.capture.state import release
from transformers_falcon_spec.generation.slot_cache import Shapes

__all__ = ["cuda", "fake_cuda"]
pytestmark = [pytest.mark.families, pytest.mark.pretend]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
}


def test_the_device_finds_what_cuda_would(cuda: type[FakeGraph]) -> None:
    tensor = torch.arange(4, device="cuda")
    asking = {
        "a value is read": lambda: int(tensor.sum()),
        "a list is an index": lambda: tensor[[1, 2]],
        "a number becomes a tensor": lambda: torch.tensor([1], device="cuda"),
        "a mask chooses": lambda: tensor[tensor > 1],
    }
    failures = {}
    for what, ask in asking.items():
        work = RepeatedWork(tensor.device)
        work.run(ask)
        failures[what] = work.failure
    clean = RepeatedWork(tensor.device)
    clean.run(lambda: tensor.add_(1))
    clean.run(lambda: None)

    assert [what for what, failure in failures.items() if "it asks the host" not in str(failure)] == []
    assert clean.failure is None
    assert tensor.tolist() == [4, 5, 6, 7]  # two runs to warm up, and two replays
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(4)


CASES = [*in_turn((kind for kind in KINDS if kind != "with an adapter"), MODES), ("dflash", "sampling")]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_every_drafter_is_captured_whole(cuda: type[FakeGraph], kind: str, mode: str) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter(kind, target)
    plain = runs.plain(target, prompt, **MODES[mode]).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    outputs = [runs.drafted(target, drafter, prompt, **MODES[mode]) for _ in range(2)]

    assert isinstance(outputs[0].sequences, Pretend)
    assert [output.sequences.tolist() for output in outputs] == [plain.tolist()] * 2
    assert all(output.speculation.num_drafted > 0 for output in outputs)
    assert not [note for note in outputs[1].speculation.notes if "could not be captured" in note]
    assert "capture begins" in cuda.log


SAMPLED = {"do_sample": True, "temperature": 0.8}
GROWN = {"dynamic_tree": True, "prompt_lookup_num_tokens": 4}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # of the process; options of drafter and call
    "deterministic algorithms": ("deterministic", {"capture": True}, {}),
    "default device": ("device", {"capture": True}, {}),
    "default device, a seeded race": ("device", {"capture": False, "verifier": "gumbel"}, SAMPLED),
    "default device, repeated text": ("device", {"capture": False, "tune": True, **GROWN}, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_process_change_no_text(
    setting: str, cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, chosen, options = SETTINGS[setting]
    monkeypatch.setattr(tuning, "cost_model_of", lambda *_: Fickle(0))  # which has prices from the first step on
    monkeypatch.setattr(norms, "_FITS", {})  # as in a new process
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter("falcon", target)
    drafter.generation_config = SpeculationConfig(**{"tune": False, **chosen, "capture": False})
    expected = runs.drafted(target, drafter, prompt, **options).sequences
    drafter.generation_config.capture = chosen["capture"]
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    if kind == "device":
        torch.set_default_device("cuda")
    else:
        torch.use_deterministic_algorithms(True)
    try:
        output = runs.drafted(target, drafter, prompt, **options)
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)

    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.num_drafted > 0
    assert not [note for note in output.speculation.notes if "could not be captured" in note]


@pytest.mark.parametrize(("family", "kind"), in_turn(("cohere", "gemma2", "modernbert_decoder"), ("falcon", "medusa")))
def test_a_head_of_more_than_a_matrix_is_captured(cuda: type[FakeGraph], family: str, kind: str) -> None:
    target, prompt = make_target(family), make_prompt()
    drafter = every_drafter(kind, target)
    plain = runs.plain(target, prompt).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    outputs = [runs.drafted(target, drafter, prompt) for _ in range(2)]

    assert [output.sequences.tolist() for output in outputs] == [plain.tolist()] * 2
    assert not [note for note in outputs[1].speculation.notes if "could not be captured" in note]
    assert "capture begins" in cuda.log


def test_a_target_that_asks_the_host_runs_uncaptured_and_the_rest_is_captured(cuda: type[FakeGraph]) -> None:
    target, prompt = make_target("falcon"), make_prompt()  # which indexes with a list
    drafter = every_drafter("falcon", target)
    plain = runs.plain(target, prompt).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    output = runs.drafted(target, drafter, prompt)

    assert output.sequences.tolist() == plain.tolist()
    assert [
        note for note in output.speculation.notes if "could not be captured" in note and "it asks the host" in note
    ]
    assert cuda.log.count("capture begins") >= 3  # drafts, what they read, and the choice of tokens
    assert cuda.num_pools == 1  # of target and drafter: it was not spoilt


def test_a_step_waits_for_the_device_once(cuda: type[FakeGraph]) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter("falcon", target)

    assert_a_step_waits_once(*map(to_device, (target, drafter, prompt)))


def test_a_draw_is_not_refused_while_another_thread_captures(
    cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter("eagle-3", target)
    drafter.generation_config.capture, drafter.generation_config.tune = False, False
    expected = runs.drafted(target, drafter, prompt, **MODES["sampling"]).sequences
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    monkeypatch.setattr(device, "is_captured_elsewhere", True)
    output = runs.drafted(target, drafter, prompt, **MODES["sampling"])

    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("phase", PHASES)
def test_work_that_fails_while_it_is_captured_costs_nothing_but_its_graph(
    cuda: type[FakeGraph], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter("falcon", target)
    plain = runs.plain(target, prompt).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))
    run = RepeatedWork.run

    def spoiled(self: RepeatedWork, work: Any, *proof: Any) -> None:
        def asking() -> None:
            if cuda.capturing is not None and phase_of(work) == phase:
                prompt.tolist()  # before the work, which a capture on CUDA would not do either
            work()

        run(self, work if isinstance(work, JoinedPieces) else asking, *proof)

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedWork, "run", spoiled)
        failing = [runs.drafted(target, drafter, prompt) for _ in range(2)]
    num_captured = len(cuda.graphs)
    release(target)
    whole = runs.drafted(target, drafter, prompt)

    assert [output.sequences.tolist() for output in (*failing, whole)] == [plain.tolist()] * 3
    assert all("could not be captured" in output.speculation.notes[-1] for output in failing)
    assert num_captured > 0
    assert whole.speculation.notes == []
    assert not cuda.recording


@pytest.mark.parametrize("kind", ["falcon", "eagle-3", "layers in parallel"])
def test_a_text_that_outgrows_its_buffers_is_captured_anew(
    cuda: type[FakeGraph], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "BUCKETS", Shapes(is_exact=False, least_slots=16))
    target, prompt = make_target(), make_prompt()
    drafter = every_drafter(kind, target)
    plain = runs.plain(target, prompt, max_new_tokens=60).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    short, *long = [runs.drafted(target, drafter, prompt, max_new_tokens=num_new) for num_new in (8, 60, 60)]

    assert short.sequences.tolist() == plain[:, : short.sequences.shape[1]].tolist()
    assert [output.sequences.tolist() for output in long] == [plain.tolist()] * 2
    assert not [note for output in (short, *long) for note in output.speculation.notes]


EXPERTS = ("deepseek_v3", "gpt_oss", "qwen3_moe")
MIXERS = ("qwen3_5", "nemotron_h", "lfm2", "mamba")  # one of each kind
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in RECURRENT if family not in MIXERS]


@pytest.mark.parametrize("family", [*EXPERTS, *MIXERS, *OTHERS])
def test_a_target_with_experts_or_recurrent_layers_is_captured_whole(cuda: type[FakeGraph], family: str) -> None:
    target, prompt = make_target(family), make_prompt()
    drafter = every_drafter("falcon", target)
    plain = runs.plain(target, prompt).sequences
    knowing = InformedDrafter(RandomDrafter(tune=False), plain)
    for each in (drafter, knowing):
        each.generation_config.capture, each.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    outputs = [runs.drafted(target, drafter, prompt) for _ in range(2)]
    kept = runs.drafted(target, knowing, prompt)

    assert [output.sequences.tolist() for output in (*outputs, kept)] == [plain.tolist()] * 3
    assert [output.speculation.notes for output in outputs] == [[], []]
    assert all(output.speculation.num_drafted > 0 for output in outputs)
    assert kept.speculation.acceptance_length > 1.5
    assert not [note for note in kept.speculation.notes if "could not be captured" in note]
    assert "capture begins" in cuda.log


SPOILED: dict[str, tuple[str, Any]] = {
    "logits": ("read", lambda proof: proof.results()[0]),
    "features": ("read", lambda proof: proof.results()[1]),
    "roots": ("accept", lambda proof: proof.changed()[0]),
    "slots or states": ("accept", lambda proof: proof.changed()[-1]),
    "features of the path": ("accept", lambda proof: proof.results()[-1]),
}


@contextmanager
def _wrong_replays(
    cuda: type[FakeGraph], phase: str, choose: Callable[[Proof], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Inside, replays of a phase's work spoil a tensor in the end, which is chosen by what proves the work."""
    run, replay = RepeatedWork.run, cuda.replay
    proofs: list[Proof] = []  # of the work that runs

    def noted(self: RepeatedWork, work: Any, *proof: Proof) -> None:
        proofs[:] = proof if phase_of(work) == phase else []
        run(self, work, *proof)

    def spoiled(self: FakeGraph) -> None:
        replay(self)
        for proof in proofs:
            tensor = choose(proof)
            tensor.copy_(tensor.roll(1, -1) + 1)

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedWork, "run", noted)
        patch.setattr(cuda, "replay", spoiled)
        yield


@pytest.mark.parametrize(("what", "family"), [*((what, "llama") for what in SPOILED), ("slots or states", "qwen3_5")])
def test_a_wrong_replay_is_found_before_it_writes_text(
    what: str, family: str, cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = make_target(family), make_prompt()
    drafter = every_drafter("falcon", target)
    plain = runs.plain(target, prompt).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    with _wrong_replays(cuda, *SPOILED[what], monkeypatch):
        wrong = runs.drafted(target, drafter, prompt)
    doubted = Report("target", "drafter")
    check_capture(target, doubted)
    num_made = cuda.made
    later = runs.drafted(target, drafter, prompt)
    both = runs.drafted(target, drafter, prompt.repeat(2, 1))
    num_made_later = cuda.made - num_made
    release(target)
    anew = runs.drafted(target, drafter, prompt)
    proven = Report("target", "drafter")
    check_capture(target, proven)

    found = [output.sequences.tolist() for output in (wrong, later, both, anew)]
    assert found == [plain.tolist(), plain.tolist(), plain.repeat(2, 1).tolist(), plain.tolist()]
    for output in (wrong, later, both):
        (note,) = output.speculation.notes
        assert note.startswith(f"Work on this target is not captured any more: a replay of what {SPOILED[what][0]}")
    assert num_made_later == 0
    assert anew.speculation.notes == []
    assert (doubted.names, proven.names) == (["wrong replays"], [])
    assert proven.sections["capture"]["num_captured"] > proven.sections["capture"]["num_proven"] >= 2
    assert proven.sections["capture"]["failures"] == []
