"""Captured steps write the target's own text: on CUDA for the main families and every drafter, on a CPU with work repeated on tapes.

Without a GPU a family and all drafters show that these tests can be passed. `make test-gpu` runs all of them captured; there work that asks the
device for a value is found while it warms up, runs uncaptured, and fails the test by its note.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.on_gpu.phases import watched_work
from tests import runs
from tests.every_drafter import KINDS, every_drafter, informed_of
from tests.fake_cuda import fake_cuda
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DraftTree, FalconSpecDrafter
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.generation.capture import graph
from transformers_falcon_spec.generation.capture.graph import RepeatedWork
from transformers_falcon_spec.generation.capture.state import states_of

__all__ = ["fake_cuda"]
pytestmark = pytest.mark.families
MODELS = Path(__file__).parents[3] / "models"
MAIN_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere", "granite", "gpt2", "gpt_neox"),
    *("mixtral", "qwen3_moe", "llama4"),
)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
}
UNCAPTURED = "could not be captured"
CAPTURED_KINDS = [kind for kind in KINDS if kind != "with an adapter"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where work is captured: a CPU with tapes for graphs, or CUDA."""
    if request.param == "cpu":
        request.getfixturevalue("fake_cuda")
    return torch.device(request.param)


def assert_captured(target: Any, drafter: Any, prompt: Tensor, **options: Any) -> Any:
    """Two calls write plain decoding's text; the first makes graphs, the second repeats them alone. Returns its output.

    No piece of work is left out: one that asks the host runs uncaptured, and a note says where.
    """
    drafter.generation_config.capture, drafter.generation_config.tune = True, False  # one size of tree
    plain = runs.plain(target, prompt, **options)
    with watched_work(torch.device("cpu")) as watch:
        first = runs.drafted(target, drafter, prompt, **options)
        num_captures = watch.num_captures
        second = runs.drafted(target, drafter, prompt, **options)

    assert (first.sequences.tolist(), second.sequences.tolist()) == (plain.sequences.tolist(),) * 2
    assert num_captures > 0
    assert watch.num_captures == num_captures
    assert watch.marks
    assert not [note for note in first.speculation.notes + second.speculation.notes if UNCAPTURED in note]
    return second


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("device", "family"),
    [("cpu", "llama"), *(pytest.param("cuda", family, marks=pytest.mark.gpu) for family in MAIN_FAMILIES)],
    indirect=["device"],
)
def test_a_family_writes_its_own_text_captured(device: torch.device, family: str, mode: str) -> None:
    target, prompt = make_target(family).to(device), make_prompt().to(device)
    drafter = every_drafter("falcon", target).to(device)
    text = runs.plain(target, prompt, **MODES[mode]).sequences

    output = assert_captured(target, informed_of(drafter, text), prompt, **MODES[mode])

    assert output.speculation.acceptance_length > 1


@pytest.mark.parametrize(
    ("device", "kind", "mode"),  # a GPU is quick: it has all pairs
    [
        *(("cpu", kind, mode) for kind, mode in in_turn(CAPTURED_KINDS, MODES)),
        *(pytest.param("cuda", kind, mode, marks=pytest.mark.gpu) for kind in CAPTURED_KINDS for mode in MODES),
    ],
    indirect=["device"],
)
def test_every_drafter_writes_the_text_captured(device: torch.device, kind: str, mode: str) -> None:
    target, prompt = make_target().to(device), make_prompt().to(device)
    drafter = every_drafter(kind, target).to(device)

    output = assert_captured(target, drafter, prompt, **MODES[mode])

    assert output.speculation.num_drafted > 0


@pytest.mark.parametrize("kind", ["falcon", "layers in parallel", "diffusion"])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_text_that_outgrows_its_buffers_is_captured_anew(device: torch.device, kind: str) -> None:
    target, prompt = make_target(max_position_embeddings=2048).to(device), make_prompt(244).to(device)
    drafter = every_drafter(kind, target).to(device)
    if kind == "falcon":
        drafter.generation_config.draft_tree = DraftTree.chain(4).to_json()  # two passes, with a state between them

    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    plain = runs.plain(target, prompt, max_new_tokens=24)

    options = {"max_new_tokens": 24, "output_scores": True}  # so that the host chooses
    outputs = [runs.drafted(target, drafter, prompt, **options) for _ in range(2)]

    assert [output.sequences.tolist() for output in outputs] == [plain.sequences.tolist()] * 2
    assert all(output.speculation.num_drafted > 0 for output in outputs)
    assert not [note for output in outputs for note in output.speculation.notes if UNCAPTURED in note]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_padded_rows_that_end_apart_are_captured(device: torch.device, mode: str) -> None:
    target = make_target().to(device)
    prompt = torch.cat([make_prompt(seed=seed) for seed in range(3)]).to(device)
    mask = torch.ones_like(prompt)
    mask[1, :4], mask[2, :7] = 0, 0
    options = {**MODES[mode], "attention_mask": mask}
    drafter = every_drafter("falcon", target).to(device)
    drafter.generation_config.tune = False
    drafter.generation_config.capture = False
    dynamic = runs.drafted(target, drafter, prompt, **options).sequences
    new_ids = dynamic[:, prompt.shape[1] :]
    options["eos_token_id"] = int(new_ids[0, 5])  # ends the first row there, the others elsewhere or not at all
    expected = runs.drafted(target, drafter, prompt, **options)

    drafter.generation_config.capture = True
    outputs = [runs.drafted(target, drafter, prompt, **options) for _ in range(2)]

    assert [output.sequences.tolist() for output in outputs] == [expected.sequences.tolist()] * 2
    assert len({row.num_tokens for row in outputs[0].speculation.rows}) > 1


@pytest.mark.parametrize("mode", ["greedy", "temperature 1"])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_the_embedded_pair_keeps_its_drafts_captured(device: torch.device, mode: str) -> None:
    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    target, prompt = (
        target.to(device),
        tokenizer("What is seven plus five?", return_tensors="pt")["input_ids"].to(device),
    )
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference").eval().to(device)
    options = {} if mode == "greedy" else {"do_sample": True, "temperature": 1.0, "top_k": 0}

    output = assert_captured(target, drafter, prompt, max_new_tokens=32, **options)

    assert output.speculation.acceptance_length > 1.5
    assert output.speculation.notes == []


def assert_a_step_waits_once(target: Any, drafter: Any, prompt: Tensor) -> None:
    """Each step of a later call waits for the device once, pieces that were joined to one graph included."""
    drafter.generation_config.tune, drafter.generation_config.capture = False, True
    plain = runs.plain(target, prompt).sequences

    def counts(num_new: int) -> tuple[int, int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = runs.drafted(target, drafter, prompt, max_new_tokens=num_new)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        assert output.sequences.tolist() == plain[:, : prompt.shape[1] + num_new].tolist()
        return sum("synchroniz" in str(each.message) for each in caught), output.speculation.num_steps

    for _ in range(2):  # the first call makes the graphs, and the second one joins those of its first steps
        counts(24)
    (few_waits, few_steps), (many_waits, many_steps) = counts(12), counts(24)

    assert many_waits - few_waits == many_steps - few_steps > 0
    assert any(state.pool.joined for state in states_of(target))


@pytest.mark.gpu
def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "OFTEN", 1)  # so that pieces are joined in the first call
    target = make_target().cuda()

    assert_a_step_waits_once(target, every_drafter("falcon", target).cuda(), make_prompt().cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["falcon", "falcon_new_block"])
def test_a_target_that_asks_the_host_is_read_uncaptured_and_the_next_one_is_captured(family: str) -> None:
    asking, prompt = make_target(family).cuda(), make_prompt().cuda()
    drafter = every_drafter("falcon", asking).cuda()
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    plain = runs.plain(asking, prompt)

    outputs = [runs.drafted(asking, drafter, prompt) for _ in range(2)]

    assert [output.sequences.tolist() for output in outputs] == [plain.sequences.tolist()] * 2
    for output in outputs:
        assert any(UNCAPTURED in note and "modeling_falcon.py" in note for note in output.speculation.notes)
    target = make_target().cuda()
    assert_captured(target, every_drafter("falcon", target).cuda(), prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_do_not_use_memory_that_others_free(num_rows: int, dtype: torch.dtype) -> None:
    inputs = torch.randn(num_rows, 8192, device="cuda", dtype=dtype)
    weights = torch.randn(2, 8192, 8192, device="cuda", dtype=dtype) / 90
    found, work = torch.zeros_like(inputs), RepeatedWork(inputs.device)

    def multiply() -> None:
        found.copy_(inputs @ weights[0] @ weights[1])

    work.run(multiply)
    torch._C._cuda_clearCublasWorkspaces()  # as `torch.compile(mode="reduce-overhead")` does elsewhere in a process
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    inputs.normal_()
    work.run(multiply)

    assert work.is_captured
    assert len(others) == 64
    torch.testing.assert_close(found, inputs @ weights[0] @ weights[1])
