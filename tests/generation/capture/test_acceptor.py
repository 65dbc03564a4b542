"""What the device accepts becomes text on the host, whoever else ends a text or draws meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests import runs
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.core.sampling import GeneratorDraws
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.generation.capture.acceptor import DeviceAcceptor
from transformers_falcon_spec.generation.capture.scoring import DeviceScoring
from transformers_falcon_spec.generation.capture.state import StaticState, TreeBuffers, release, states_of

MODELS = Path(__file__).parents[3] / "models"
PROMPT = torch.tensor([[1, 2, 3]])


class DrawingCriterion(StoppingCriteria):
    """Ends nothing, but draws a number for every second token."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] % 2:
            torch.rand(1)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target")
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference")
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    return target, drafter


def test_a_text_that_ends_within_its_path_needs_no_work_of_its_own(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    text = runs.plain(target, PROMPT, max_new_tokens=24).sequences
    runs.drafted(target, drafter, PROMPT, max_new_tokens=24)
    [state] = states_of(target)
    num_graphs = len(state.all_work)

    for token in set(text[0, 6:].tolist()):
        ended = runs.drafted(target, drafter, PROMPT, max_new_tokens=24, eos_token_id=token).sequences

        end = PROMPT.shape[1] + text[0, PROMPT.shape[1] :].tolist().index(token) + 1
        assert ended.tolist() == text[:, :end].tolist()

    assert len(state.all_work) == num_graphs


def test_tokens_behind_a_draw_of_others_are_chosen_anew(pair: tuple[Any, Any]) -> None:
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 32}

    drawn = runs.both(*pair, PROMPT, stopping_criteria=StoppingCriteriaList([DrawingCriterion()]), **options)

    drawn.assert_equal()


def test_no_noise_is_drawn_twice(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair
    monkeypatch.setattr(drafter.generation_config, "prompt_lookup_num_tokens", 0)  # else ten tokens
    drawn: list[int] = []  # tokens by step
    kept: list[int] = []
    fill, read = GeneratorDraws.fill_ahead, DeviceAcceptor._read

    def filled(self: GeneratorDraws, noise: Tensor, start: Any = None) -> Any:
        drawn[-1] += len(noise)
        return fill(self, noise, start)

    def read_by_host(self: DeviceAcceptor, *args: Any) -> Any:
        steps = read(self, *args)
        kept.append(len(steps[0].path.path))
        drawn.append(0)
        return steps

    monkeypatch.setattr(GeneratorDraws, "fill_ahead", filled)
    monkeypatch.setattr(DeviceAcceptor, "_read", read_by_host)
    drawn.append(0)

    runs.drafted(target, drafter, PROMPT, do_sample=True, top_k=0, max_new_tokens=32)

    first = drawn.index(9)  # of six drafted tokens, shapes of eight, and the bonus token
    assert drawn[first + 1 : -2] == kept[first:-2]  # then only what has become text; the last draft is shorter
    assert max(kept) > 1


def test_a_call_of_one_token_needs_no_buffers(pair: tuple[Any, Any]) -> None:
    release(pair[0])

    runs.both(*pair, PROMPT, max_new_tokens=1).assert_equal(is_kept=False)

    assert not states_of(pair[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_nodes", [1, 8, 32])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nodes_that_choose_at_once_give_the_path_of_the_walk(do_sample: bool, num_nodes: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, vocab_size = 9, 3  # so that siblings are alike, and paths long
    buffers = TreeBuffers(rows, num_nodes, torch.device("cpu"))
    token_ids = torch.randint(vocab_size, (rows, num_nodes), generator=random)
    parents = torch.full_like(token_ids, -1)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(node, (rows,), generator=random)
    buffers.give(token_ids, parents)
    buffers.depths.copy_(DraftTree(buffers.parents, buffers.parents).depths)
    buffers.text_parents.copy_(buffers.parents)
    buffers.text_parents[:, num_nodes // 2 :].masked_fill_(
        torch.rand(rows, num_nodes - num_nodes // 2, generator=random) < 0.3, -1
    )
    buffers.logits = torch.randn(rows, num_nodes, vocab_size, generator=random)
    acceptor = DeviceAcceptor.__new__(DeviceAcceptor)
    acceptor._scoring = DeviceScoring(LogitsProcessorList(), rows, vocab_size, torch.device("cpu"))
    acceptor._batch = SimpleNamespace(do_sample=do_sample)
    acceptor._state = StaticState(1, torch.zeros(rows, 1, dtype=torch.long), 64)
    acceptor._state.is_open[3] = False
    acceptor._state.noise_of(num_nodes + 1, vocab_size).exponential_(generator=random)
    if do_sample:
        buffers.logits[1, num_nodes // 2 :] = -torch.inf  # there no token can be drawn

    walked, looked_up = (way(buffers, num_nodes) for way in (acceptor._walk, acceptor._look_up))

    assert looked_up[2].equal(walked[2])
    assert looked_up[3].equal(walked[3])
    is_kept = torch.arange(num_nodes + 1) < walked[2]
    for mine, theirs in zip(looked_up[:2], walked[:2], strict=True):
        assert mine[is_kept].equal(theirs[is_kept])
    assert walked[2][3] == 0
    assert num_nodes == 1 or walked[2].max() > 1
