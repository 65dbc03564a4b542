"""The work of a step asks the host for nothing: it runs on the meta device, where every question raises."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.families import DRAFTED, FAMILIES, RECURRENT, VOCAB_SIZE
from tests.generation.capture.test_texts import INELIGIBLE
from transformers_falcon_spec.generation.capture import graph
from transformers_falcon_spec.generation.capture.acceptor import DeviceAcceptor, PathBuffers
from transformers_falcon_spec.generation.capture.scoring import DeviceScoring
from transformers_falcon_spec.generation.capture.state import StaticState
from transformers_falcon_spec.generation.capture.target import FixedTarget
from transformers_falcon_spec.generation.inputs import StepInputs
from transformers_falcon_spec.generation.stock_cache import StockSlots
from transformers_falcon_spec.generation.target import Target

META, NUM_ROWS, DEPTH = torch.device("meta"), 2, 4
# RemBERT's head reads other states than its layers give, whose width is seen in a forward: that needs weights.
# Which modules update recurrent states is seen in a forward, too.
ELIGIBLE = [family for family in DRAFTED if family not in {*INELIGIBLE, *RECURRENT, "rembert"}]
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}


def _target(family: str) -> FixedTarget:
    """A target without weights, in the middle of a text, as after its prefill."""
    row = FAMILIES[family]
    with META:
        model = AutoModelForCausalLM.from_config(getattr(transformers, row.config)(**row.fields)).eval()
    target = Target(model, (-1,))
    offsets = torch.zeros(NUM_ROWS, 1, dtype=torch.long, device=META)
    target.inputs = StepInputs(offsets)
    target.slots = StockSlots(None, torch.zeros(NUM_ROWS, 0, dtype=torch.long))  # of no use here
    fixed = object.__new__(FixedTarget)
    fixed._target, fixed.state = target, StaticState(target.config.num_hidden_layers, offsets, 256)
    return fixed


@pytest.mark.parametrize("family", ELIGIBLE)
def test_reading_and_accepting_ask_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "is_captured", lambda _device: True)  # experts are computed as they are there
    fixed = _target(family)
    target, state = fixed._target, fixed.state
    buffers = state.tree(8)
    processors = target.model._get_logits_processor(GenerationConfig(**SAMPLING), 12, device="cpu")
    acceptor = object.__new__(DeviceAcceptor)
    acceptor._state, acceptor._batch = state, SimpleNamespace(do_sample=True)
    acceptor._scoring = DeviceScoring(processors, NUM_ROWS, VOCAB_SIZE, META)
    state.noise = torch.ones(DEPTH + 1, NUM_ROWS, VOCAB_SIZE, device=META)

    with torch.no_grad(), target.feature_hooks.active():
        fixed._read_buffers(buffers, 256)
        assert buffers.features is not None
        paths = PathBuffers(NUM_ROWS, DEPTH, META, buffers.features)
        acceptor._run(buffers, paths, DEPTH)

    assert buffers.logits.shape[:2] == (NUM_ROWS, 8)
    assert len(processors) == 4


def test_a_question_to_the_host_would_be_noticed() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(torch.zeros(1, device=META))
