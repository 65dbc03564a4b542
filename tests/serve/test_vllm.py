"""The proposer for vLLM, driven as vLLM's runner drives it; vLLM itself is not needed."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.runs import prefilled
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.errors import DrafterMismatchError, GenerationError, OptionError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.serve.vllm import EngineTarget, FalconProposer

from .conftest import MODELS

DEPTH = 6
CAPACITY = 256
PROMPTS = ("What is 3 plus 4?", "Tom has 5 apples and buys 7 more. How many apples does he have?", "Once upon a time")


class EngineModel(nn.Module):
    """The parts of a vLLM model that a proposer uses; its forward gives the hidden states that it is handed."""

    def __init__(self, target: Any, soft_cap: float | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.target = target
        self.lm_head = target.get_output_embeddings()
        self.logits_processor = SimpleNamespace(soft_cap=soft_cap, scale=scale)

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        return self.target.get_input_embeddings()(token_ids)

    def compute_logits(self, states: Tensor) -> Tensor:
        logits = self.lm_head(states)
        soft_cap = self.logits_processor.soft_cap
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits * self.logits_processor.scale

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        return states


@dataclass
class Request:
    """One request, as the runner keeps it."""

    text: list[int]
    num_read: int = 0
    draft: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)  # of all steps so far
    num_accepted: int = 0
    num_rejected: int = 0


class Runner:
    """Reads chunks of prompts and drafts, accepts what greedy decoding agrees with, and asks for drafts."""

    def __init__(self, target: Any, proposer: FalconProposer, context: Any) -> None:
        self.target = target
        self.proposer = proposer
        self.context = context
        self.model = EngineModel(target)
        proposer.load_model(self.model)

    def step(self, requests: list[Request], most: int = 100) -> None:
        """One step of these requests, in this order, with at most so many tokens of each."""
        states, positions, starts, sampled = [], [], [0], []
        for request in requests:
            end = min(request.num_read + most, len(request.text) + len(request.draft))
            read = (request.text + request.draft)[:end]
            states.append(hidden_states(self.target, read)[request.num_read :])
            positions += range(request.num_read, end)
            starts.append(len(positions))
            sampled.append(self._sampled(request, read, states[-1]))

        self.context.attn_metadata = {"model.layers.0": SimpleNamespace(query_start_loc=torch.tensor(starts))}
        self.model(states=torch.cat(states), positions=torch.tensor(positions))

        texts = np.zeros((len(requests), CAPACITY), dtype=np.int32)
        for row, request in enumerate(requests):
            texts[row, : len(request.text)] = request.text
        lengths = np.array([len(request.text) for request in requests])
        drafts = self.proposer.propose(sampled, lengths, texts, slot_mappings=None)
        for request, draft in zip(requests, drafts, strict=True):
            request.draft = draft
            request.drafts.append(draft)

    def _sampled(self, request: Request, read: list[int], states: Tensor) -> list[int]:
        """Add the tokens that follow the text; none while the prompt is read."""
        length = len(request.text)
        if len(read) < length:
            request.num_read = len(read)
            return []

        best = self.model.compute_logits(states[length - 1 - request.num_read :]).argmax(-1).tolist()
        num_accepted = 0
        while num_accepted < len(request.draft) and request.draft[num_accepted] == best[num_accepted]:
            num_accepted += 1

        request.num_accepted += num_accepted
        request.num_rejected += len(request.draft) - num_accepted
        request.num_read = length + num_accepted
        request.text += best[: num_accepted + 1]
        return best[: num_accepted + 1]


def hidden_states(target: Any, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        return target(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]


def own_drafts(target: Any, drafter: Any, prompt: list[int], lengths: list[int], text: list[int]) -> list[list[int]]:
    """The chains of `generate`'s own generator, asked where the text had these lengths, of one request alone."""
    drafter.generation_config.draft_tree = DraftTree.chain(DEPTH).to_json()
    view = prefilled(target, torch.tensor([prompt]))
    generator = drafter.candidate_generator(view, CAPACITY, torch.Generator())
    features = hidden_states(target, text)[None]
    drafts = []
    read = 0
    for length in lengths:
        ids = torch.tensor([text])
        num_new = length - 1 - read
        generator.commit(Committed(ids, (length,), (num_new,), features[:, read : length - 1]))
        read = length - 1
        with torch.inference_mode():
            draft = generator.propose(DraftBudget((DEPTH,), DEPTH + 1, is_chain=True))
        assert draft is not None
        drafts.append(draft.token_ids[0, 1:].tolist())
    drafter.generation_config.draft_tree = None
    return drafts


def vllm_config(**changes: Any) -> Any:
    """What vLLM tells a proposer of its settings."""
    model = {"max_model_len": CAPACITY, "dtype": torch.float32}
    sizes = {"get_vocab_size": lambda: 4096, "get_hidden_size": lambda: changes.get("hidden_size", 256)}
    return SimpleNamespace(
        additional_config=changes.get("extra", {"falcon_drafter": str(MODELS / "falcon-reference")}),
        cache_config=SimpleNamespace(enable_prefix_caching=changes.get("enable_prefix_caching", False)),
        parallel_config=SimpleNamespace(world_size=changes.get("world_size", 1)),
        scheduler_config=SimpleNamespace(max_num_seqs=changes.get("max_num_seqs", 4)),
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
        model_config=SimpleNamespace(**model, **sizes),
    )


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The forward context, where vLLM keeps what a forward is about."""
    context = SimpleNamespace(attn_metadata=None)
    module = ModuleType("vllm.forward_context")
    vars(module)["get_forward_context"] = lambda: context
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return context


def test_requests_that_join_move_wait_and_leave_get_the_drafts_of_generate(pair: Any, context: Any) -> None:
    target, tokenizer, drafter = pair
    runner = Runner(target, FalconProposer(vllm_config()), context)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    first, second, third, twin = (Request(list(prompt)) for prompt in (*prompts, prompts[0]))

    runner.step([first])
    runner.step([first, second], most=8)  # in chunks
    runner.step([second, first, third])  # others have moved
    runner.step([third, second])  # one waits
    runner.step([first, third, twin])
    runner.step([twin, first, second, third])
    runner.step([second, twin])  # two have left
    runner.step([second, twin])

    assert second.drafts[0] == []  # within its prompt
    assert sum(request.num_accepted for request in (first, second, third, twin)) > 0
    assert sum(request.num_rejected for request in (first, second, third, twin)) > 0
    for request, prompt in zip((first, second, third, twin), (*prompts, prompts[0]), strict=True):
        drafts = [draft for draft in request.drafts if draft]
        lengths = lengths_of(request, len(prompt), drafts)
        assert drafts == own_drafts(target, drafter, prompt, lengths, request.text)


def lengths_of(request: Request, length: int, drafts: list[list[int]]) -> list[int]:
    """How long a text was when each draft was made: after each, the tokens that were taken of it and one more."""
    lengths = [length + 1]
    for draft in drafts[:-1]:
        rest = request.text[lengths[-1] :]
        agreed = [a == b for a, b in zip(draft, rest, strict=False)]
        num_accepted = agreed.index(False) if False in agreed else len(agreed)
        lengths.append(lengths[-1] + num_accepted + 1)
    return lengths


def test_a_request_whose_hidden_states_are_missing_gets_no_drafts_and_others_do(pair: Any, context: Any) -> None:
    target, tokenizer, _ = pair
    runner = Runner(target, FalconProposer(vllm_config()), context)
    first, second = (Request(tokenizer(prompt).input_ids) for prompt in PROMPTS[:2])
    runner.step([first, second])

    first.num_read += 1
    runner.step([first, second])

    assert first.drafts[-1] == []
    assert second.drafts[-1]


def test_texts_of_requests_that_ended_do_not_pile_up(pair: Any, context: Any) -> None:
    target, tokenizer, _ = pair
    runner = Runner(target, FalconProposer(vllm_config(max_num_seqs=2)), context)

    for prompt in PROMPTS:
        runner.step([Request(tokenizer(prompt).input_ids)])

    assert len(runner.proposer.texts) == 2


def test_trial_runs_are_not_kept_and_forwards_that_nobody_saw_are_an_error(pair: Any, context: Any) -> None:
    runner = Runner(pair[0], FalconProposer(vllm_config()), context)
    runner.model(states=torch.zeros(1, 256), positions=torch.zeros(1))

    with pytest.raises(GenerationError, match="--enforce-eager"):
        runner.proposer.propose([[1]], np.array([2]), np.zeros((1, CAPACITY), dtype=np.int32))


def test_a_backend_that_does_not_part_requests_is_refused(pair: Any, context: Any) -> None:
    runner = Runner(pair[0], FalconProposer(vllm_config()), context)
    context.attn_metadata = {"model.layers.0": SimpleNamespace()}

    with pytest.raises(GenerationError, match="--attention-backend"):
        runner.model(states=torch.zeros(1, 256), positions=torch.zeros(1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": {}}, "falcon_drafter"),
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"world_size": 2}, "without tensor and pipeline parallelism"),
    ],
)
def test_settings_with_which_hidden_states_are_missing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        FalconProposer(vllm_config(**changes))


def test_logits_of_some_tokens_are_those_of_the_whole_head(pair: Any) -> None:
    view = EngineTarget(EngineModel(pair[0], soft_cap=0.5, scale=0.25), 4096, 256)
    features = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([4, 1, 9])

    some = view.head(features, rows=view.head_rows(tokens))

    torch.testing.assert_close(some, view.head(features)[..., tokens])
    assert 0 < some.abs().max() <= 0.125


def test_a_drafter_that_is_no_falcon_is_refused(pair: Any) -> None:
    proposer = FalconProposer(vllm_config(extra={"falcon_drafter": str(MODELS / "lookahead")}))

    with pytest.raises(DrafterMismatchError, match=r"must name a Falcon, but .* is a `LookaheadDrafter`"):
        proposer.load_model(EngineModel(pair[0]))


def test_a_target_of_another_size_is_refused(pair: Any) -> None:
    with pytest.raises(DrafterMismatchError, match="falcon-reference"):
        FalconProposer(vllm_config(hidden_size=128)).load_model(EngineModel(pair[0]))
