"""Falcon drafts in vLLM. The engine itself is not installed here: a stand-in calls the proposer as vLLM 0.32 does."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import FalconSpecDrafter, LookaheadDrafter
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.serve.vllm import EngineTarget, FalconProposer

DRAFTER = "models/falcon-reference"
MOST_TOKENS = 96
TEXTS = ([1, 4, 205, 48, 504, 78, 946], [1, 4, 205, 46, 269, 752, 301, 1261], [1, 4, 205, 559, 783])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained("models/reference-target", dtype=torch.float32).eval()


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `vllm.forward_context.get_forward_context` gives."""
    context = SimpleNamespace(attn_metadata=None)
    module: Any = ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: context
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return context


def engine_config(**changes: Any) -> SimpleNamespace:
    """The parts of vLLM's configuration that are read."""
    fields: dict[str, Any] = {
        "additional_config": {"falcon_drafter": DRAFTER},
        "parallel_config": SimpleNamespace(world_size=1),
        "speculative_config": SimpleNamespace(num_speculative_tokens=4),
        "model_config": SimpleNamespace(max_model_len=MOST_TOKENS, dtype=torch.float32),
        "scheduler_config": SimpleNamespace(max_num_seqs=3),
    }
    return SimpleNamespace(**{**fields, **changes})


class EngineModel(nn.Module):
    """A target with the names that models of vLLM have, which reads the rows of several requests side by side."""

    def __init__(self, target: PreTrainedModel, soft_cap: float | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = target
        self.config = target.config
        self.lm_head = target.get_output_embeddings()
        self.logits_processor = SimpleNamespace(soft_cap=soft_cap, scale=scale)
        self.texts: list[list[int]] = []  # of the requests of a step, drafted tokens included

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        return self.inner.get_input_embeddings()(token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert hidden.dim() == 2  # as vLLM's models take them
        logits = self.lm_head(hidden)
        cap = self.logits_processor.soft_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits * self.logits_processor.scale

    def forward(self, *, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The hidden states of the rows; each text was read before up to the first position of its request."""
        found = []
        at = 0
        for text in self.texts:
            hidden = self.inner.model(torch.tensor([text])).last_hidden_state[0]
            first = int(positions[at])
            assert input_ids[at : at + len(text) - first].tolist() == text[first:]
            found.append(hidden[first:])
            at += len(text) - first

        padding = torch.zeros(3, self.config.hidden_size)  # rows that belong to nobody, as graphs have them
        return torch.cat([*found, padding])


@dataclass
class Row:
    """A request as the engine knows it."""

    text: list[int]
    num_read: int = 0
    draft: list[int] = field(default_factory=list)
    num_kept: int = 0


class Engine:
    """Greedy speculative decoding of several requests, with prompts that are read in parts."""

    def __init__(self, target: PreTrainedModel, context: SimpleNamespace, part: int, **changes: Any) -> None:
        self.context = context
        self.part = part  # tokens of a prompt that one step reads
        self.model = EngineModel(target)
        self.proposer = FalconProposer(engine_config(**changes))
        self.proposer.load_model(self.model)
        self.drafted: list[tuple[list[int], list[int]]] = []

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> None:
        """Read what is new of all rows, and draft behind them."""
        self.model.texts, new_ids, positions, ends = [], [], [], [0]
        for row in rows:
            is_prompt = row.num_read < len(row.text) - 1
            shown = row.text[: row.num_read + self.part] if is_prompt else row.text + row.draft
            self.model.texts.append(shown)
            new_ids += shown[row.num_read :]
            positions += range(row.num_read, len(shown))
            ends.append(len(positions))

        self.context.attn_metadata = {"layer": SimpleNamespace(query_start_loc=torch.tensor(ends))}
        hidden = self.model(input_ids=torch.tensor(new_ids), positions=torch.tensor(positions))
        best = self.model.compute_logits(hidden).argmax(-1).tolist()

        sampled = []
        for row, shown, start in zip(rows, self.model.texts, ends, strict=False):
            new: list[int] = []
            if len(shown) >= len(row.text):  # the prompt is read
                ahead = best[start + len(row.text) - row.num_read - 1 :]
                num_kept = 0
                while num_kept < len(row.draft) and row.draft[num_kept] == ahead[num_kept]:
                    num_kept += 1

                row.num_kept += num_kept
                new = ahead[: num_kept + 1]
                row.text = row.text + new
                row.num_read = len(row.text) - 1
            else:
                row.num_read = len(shown)

            sampled.append(new)

        texts = np.zeros((len(rows), 2 * MOST_TOKENS), dtype=np.int32)
        for number, row in enumerate(rows):
            texts[number, : len(row.text)] = row.text

        drafts = self.proposer.propose(sampled, np.array([len(row.text) for row in rows]), texts, slot_mappings=None)
        for row, new, draft in zip(rows, sampled, drafts, strict=True):
            row.draft = draft
            if new:
                self.drafted.append((list(row.text), draft))


def chain_behind(target: PreTrainedModel, text: list[int], depth: int) -> list[int]:
    """The twin: what `generate`'s generator drafts of a whole text at once."""
    drafter = FalconSpecDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    drafter.generation_config.draft_tree = DraftTree.chain(4).to_json()
    ids = torch.tensor([text])
    with torch.inference_mode():
        features = target.model(ids[:, :-1]).last_hidden_state
        generator = drafter.candidate_generator(EngineTarget(EngineModel(target)), MOST_TOKENS, torch.Generator())
        generator.commit(Committed(ids, (len(text),), (len(text) - 1,), features))
        draft = generator.propose(DraftBudget((depth,), depth + 1, is_chain=True))

    return [] if draft is None else draft.token_ids[0, draft.parents[0] >= 0].tolist()


def alone(target: PreTrainedModel, text: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([text])
    return target.generate(ids, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)[0].tolist()


@pytest.mark.parametrize("part", [3, 64])
def test_requests_that_come_and_go_get_the_chains_of_their_own_texts(
    target: PreTrainedModel, forward_context: SimpleNamespace, part: int
) -> None:
    engine = Engine(target, forward_context, part)
    first, second, third = (Row(list(text)) for text in TEXTS)

    for rows in ([first], [first, second], [second, first], [second, first, third], [second, third], [third, second]):
        for _ in range(3):
            engine.step(rows)

    for text, draft in engine.drafted:
        assert draft == chain_behind(target, text, 4)
    assert len(engine.drafted) >= 20
    assert min(first.num_kept, second.num_kept, third.num_kept) > 0
    for row, prompt in zip((first, second, third), TEXTS, strict=True):
        assert row.text == alone(target, list(prompt), len(row.text) - len(prompt))


def test_a_request_keeps_what_was_read_of_it_and_ended_ones_are_forgotten(
    target: PreTrainedModel, forward_context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, forward_context, part=64)
    made = []
    make = engine.proposer.drafter.candidate_generator

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(engine.proposer.drafter, "candidate_generator", counted)
    rows = [Row(list(text)) for text in (*TEXTS, TEXTS[0])]  # the last one is a copy of the first

    for left in (rows[:2], rows[2:], rows[2:]):
        for _ in range(3):
            engine.step(left)

    assert len(made) == 4
    assert len(engine.proposer.requests) == 3  # `max_num_seqs`


def test_copies_of_a_text_have_states_of_their_own(target: PreTrainedModel, forward_context: SimpleNamespace) -> None:
    engine = Engine(target, forward_context, part=64)
    copies = [Row(list(TEXTS[0])), Row(list(TEXTS[0]))]

    for _ in range(4):
        engine.step(copies)

    assert copies[0].text == copies[1].text
    assert copies[0].draft == copies[1].draft == chain_behind(target, copies[0].text, 4)


def test_behind_a_prefix_that_the_engine_kept_it_drafts_from_what_it_sees(
    target: PreTrainedModel, forward_context: SimpleNamespace
) -> None:
    engine = Engine(target, forward_context, part=64)
    row = Row(alone(target, list(TEXTS[0]), 12), num_read=5)

    for _ in range(4):
        engine.step([row])

    assert len(engine.drafted[0][1]) == 4
    assert row.text == alone(target, list(TEXTS[0]), len(row.text) - len(TEXTS[0]))


def test_nothing_is_drafted_behind_the_context_nor_of_a_step_that_ran_no_hook(
    target: PreTrainedModel, forward_context: SimpleNamespace
) -> None:
    short = SimpleNamespace(max_model_len=len(TEXTS[0]) + 4, dtype=torch.float32)
    engine = Engine(target, forward_context, part=64, model_config=short)
    row = Row(list(TEXTS[0]))
    engine.step([row])
    assert len(row.draft) == 2  # one token was written, one more comes with the draft

    text = np.array([row.text], dtype=np.int32)
    assert engine.proposer.propose([[row.text[-1]]], np.array([len(row.text)]), text) == [[]]


def test_a_head_of_some_tokens_is_capped_and_scaled_as_the_whole_one() -> None:
    view = EngineTarget(EngineModel(make_target(), soft_cap=0.5, scale=0.25))
    features = torch.randn(2, 3, view.feature_dim, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([4, 1, 9])

    some = view.head(features, rows=view.head_rows(tokens))

    torch.testing.assert_close(some, view.head(features)[..., tokens])
    assert some.abs().max() <= 0.125


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    make_drafter(make_target()).save_pretrained(tmp_path / "falcon")
    LookaheadDrafter.from_target(make_target()).save_pretrained(tmp_path / "lookahead")
    return {name: str(tmp_path / name) for name in ("falcon", "lookahead")}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"additional_config": {}}, "`additional_config` must name the drafter"),
        ({"parallel_config": SimpleNamespace(world_size=2)}, "spread over 2"),
    ],
)
def test_an_engine_that_names_no_drafter_or_is_spread_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        FalconProposer(engine_config(**changes))


@pytest.mark.parametrize(
    ("name", "text"), [("falcon", "expects a target of width"), ("lookahead", "must be a Falcon")]
)
def test_a_drafter_that_does_not_fit_is_refused(
    target: PreTrainedModel, folders: dict[str, str], name: str, text: str
) -> None:
    proposer = FalconProposer(engine_config(additional_config={"falcon_drafter": folders[name]}))

    with pytest.raises(DrafterMismatchError, match=text):
        proposer.load_model(EngineModel(target))
