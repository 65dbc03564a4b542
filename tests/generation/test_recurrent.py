"""Targets with recurrent layers: the states are those of what is kept, and nothing else of a call stays."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import every_drafter
from tests.families import HYBRIDS, MIXERS, RECURRENT
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.generation import recurrent
from transformers_falcon_spec.generation.probe import _prefilled, probe
from transformers_falcon_spec.generation.target import Form
from transformers_falcon_spec.transformers_versions import CACHE

NUM_NODES = 5
TOLERANCE = 1e-3


def _recurrent_states(cache: Any) -> list[torch.Tensor]:
    return [state for layer in cache.layers for state in recurrent.states_of(layer).values()]


def _states(cache: Any) -> list[torch.Tensor]:
    """All tensors that a cache holds."""
    attention = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return [*_recurrent_states(cache), *(states for states in attention if states is not None)]


def _assert_same(cache: Any, other: Any) -> None:
    pairs = list(zip(_states(cache), _states(other), strict=True))
    assert len(pairs) > 3
    for mine, theirs in pairs:
        # rules are computed in single precision whatever the target's type
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def _informed(target: PreTrainedModel) -> InformedDrafter:
    """A drafter that knows most of the target's text, tuned as by default."""
    return InformedDrafter(RandomDrafter(), runs.plain(target).sequences)


@torch.no_grad()
def _read_one_by_one(target: PreTrainedModel, ids: torch.Tensor, num_prompt: int) -> DynamicCache:
    """The naive twin: the cache after a prompt and tokens that were read one by one."""
    cache = DynamicCache(config=target.config)
    for start, end in ((0, num_prompt), *((column, column + 1) for column in range(num_prompt, ids.shape[1]))):
        positions = torch.arange(start, end)[None]  # without which Bamba reads wrongly
        target(ids[:, start:end], position_ids=positions, **{CACHE: cache}, use_cache=True)
    return cache


KEPT = [  # of each row the path of three drafts
    [(), ()],
    [(0, 2, 5), (0,)],
    [(0, 1, 3), (0, 1, 2, 3)],
]
TREES = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, -1, -1]])  # the second row has two fillers


@pytest.mark.families
@pytest.mark.parametrize("family", RECURRENT)
def test_states_of_each_row_are_those_of_its_path(family: str) -> None:
    target = in_double(make_target(family))
    prompts = [make_prompt(9), make_prompt(9, seed=5)]
    text = runs.prefilled(target, torch.cat(prompts))
    text.move_to_slots(64)
    texts = list(prompts)

    for number, paths in enumerate(KEPT):
        nodes = torch.cat([make_prompt(TREES.shape[1], seed=3 + row) + number for row in range(2)])
        with torch.no_grad():
            text.read(nodes, DraftTree(TREES, torch.zeros_like(TREES)))
            text.keep(len(TREES[0]), paths)
        texts = [torch.cat([ids, nodes[row : row + 1, list(paths[row])]], dim=-1) for row, ids in enumerate(texts)]

    assert text.text is not None
    for row, ids in enumerate(texts):
        expected = _recurrent_states(_read_one_by_one(target, ids, 9))
        for mine, theirs in zip(_recurrent_states(text.text), expected, strict=True):
            torch.testing.assert_close(mine[row : row + 1], theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("num_kept", [0, 2, NUM_NODES])
@pytest.mark.parametrize("form", ["tree", "chain"])
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.families)])
def test_a_cache_that_is_returned_is_that_of_the_tokens_that_are_kept(family: str, form: Form, num_kept: int) -> None:
    target = in_double(make_target(family))
    prompt, nodes = make_prompt(9), make_prompt(NUM_NODES, seed=3)
    text = _prefilled(target, prompt, form)
    text._is_returned = True
    parents = torch.arange(-1, NUM_NODES - 1)[None]

    for number in range(2):
        with torch.no_grad():
            text.read(nodes + number, DraftTree(parents, torch.zeros_like(parents)), form)
            text.keep(NUM_NODES, [tuple(range(num_kept))])
    text.close()

    ids = torch.cat([prompt, nodes[:, :num_kept], nodes[:, :num_kept] + 1], dim=-1)
    expected = _read_one_by_one(target, ids, 9)
    _assert_same(text.cache, expected)
    ids[:, -1] += 1
    others = zip(_states(expected), _states(_read_one_by_one(target, ids, 9)), strict=True)
    assert max(float((one - other).abs().max()) for one, other in others) > 10 * TOLERANCE  # each token tells


class RaisingCriterion(StoppingCriteria):
    """Raises at a length of the text."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] >= 20:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.families)])
@pytest.mark.parametrize("is_tuned", [True, False])  # interrupted behind a root alone, and behind a draft
def test_an_interrupt_leaves_the_states_of_a_text_and_of_no_draft(family: str, is_tuned: bool) -> None:
    target = in_double(make_target(family))
    drafter = _informed(target)
    drafter.generation_config.tune = is_tuned
    cache = DynamicCache(config=target.config)

    with pytest.raises(KeyboardInterrupt):
        runs.drafted(
            target, drafter, past_key_values=cache, stopping_criteria=StoppingCriteriaList([RaisingCriterion()])
        )

    text = runs.plain(target).sequences[:, : cache.get_seq_length()]
    assert cache.get_seq_length() > make_prompt().shape[1]
    _assert_same(cache, _read_one_by_one(target, text, make_prompt().shape[1]))


class RaisingStreamer(BaseStreamer):
    """Raises at a token."""

    def __init__(self) -> None:
        self.num_left = 8

    def put(self, _: Any) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError("the text is interrupted before")


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.families)])
@pytest.mark.parametrize("is_in_read", [False, True])
def test_an_interrupt_of_a_text_in_slots_leaves_its_states(
    family: str, is_in_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = in_double(make_target(family))
    drafter = _informed(target)
    drafter.generation_config.tune = False
    cache = DynamicCache(config=target.config)
    options: dict[str, Any] = {"streamer": RaisingStreamer()}
    if is_in_read:
        options = {}
        probe(target)  # which reads drafts, too
        ends = [0]
        end = recurrent.RecurrentStates._end

        def interrupted(self: Any, *args: Any) -> Any:
            ends[0] += 1
            if ends[0] == 3:
                raise KeyboardInterrupt
            return end(self, *args)

        monkeypatch.setattr(recurrent.RecurrentStates, "_end", interrupted)

    with pytest.raises(KeyboardInterrupt):
        runs.drafted(target, drafter, past_key_values=cache, **options)

    monkeypatch.undo()
    text = runs.plain(target).sequences[:, : cache.get_seq_length()]
    assert cache.get_seq_length() > make_prompt().shape[1]
    _assert_same(cache, _read_one_by_one(target, text, make_prompt().shape[1]))


def test_nothing_of_a_call_stays_on_the_target_or_its_cache() -> None:
    target = make_target("qwen3_5")
    hooks = [len(part._forward_pre_hooks) for part in target.modules()]

    pair = runs.both(target, _informed(target))

    pair.assert_equal()
    assert [len(part._forward_pre_hooks) for part in target.modules()] == hooks
    for layer in pair.drafted.past_key_values.layers:
        assert type(getattr(layer, "conv_states", {})) is dict


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.families) for name in RECURRENT])
def test_mixers_are_found_by_a_prompt_of_one_token_behind_a_filled_cache(family: str) -> None:
    """Stock mixers read one token in another way than several: they change states without telling the cache."""
    target = in_double(make_target(family))
    prompt = make_prompt()
    caches = [_read_one_by_one(target, prompt[:, :-1], prompt.shape[1] - 1) for _ in range(2)]
    gold = runs.plain(target, past_key_values=caches[0]).sequences

    out = runs.drafted(target, InformedDrafter(RandomDrafter(), gold), past_key_values=caches[1])

    assert out.sequences.tolist() == gold.tolist()
    assert out.speculation.num_accepted > 0


def test_linear_layers_of_a_mixer_compute_all_nodes_at_once() -> None:
    target = make_target("qwen3_5")
    text = _prefilled(target, make_prompt(9))
    layer = target.model.layers[0].linear_attn
    seen: list[tuple[str, int]] = []
    names = {part: name for name, part in layer.named_children()}
    stock = torch.nn.Linear.forward

    def forward(linear: Any, tokens: torch.Tensor) -> torch.Tensor:
        if linear in names:
            seen.append((names[linear], tokens.shape[:-1].numel()))
        return stock(linear, tokens)

    tree = DraftTree.from_lists([-1, 0, 0, 1, 1, 2])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.Linear, "forward", forward)
        text.read(make_prompt(6), tree)

    computed = [each for each in seen if each[1]]  # the others get no tokens
    assert sorted(computed) == sorted(
        [("in_proj_qkv", 6), ("in_proj_z", 6), ("in_proj_a", 6), ("in_proj_b", 6), ("out_proj", 1), ("out_proj", 5)]
    )


def test_a_hook_inside_a_mixer_sees_the_nodes_level_by_level() -> None:
    target = in_double(make_target("qwen3_5"))
    linear = target.model.layers[0].linear_attn.in_proj_z
    seen: list[int] = []
    gold = runs.plain(target).sequences

    hook = linear.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape[1]))
    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold))
    hook.remove()

    assert pair.drafted.sequences.tolist() == gold.tolist()
    assert pair.stats.num_accepted > 0
    assert set(seen) == {1, 6, make_prompt().shape[1]}  # 6 is the prompt of the probe


@pytest.mark.families
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in MIXERS else pytest.mark.slow) for name in HYBRIDS]
)
def test_attention_weights_are_those_of_plain_decoding(family: str) -> None:
    target = in_double(make_target(family, attn_implementation="eager"))

    pair = runs.both(target, _informed(target), output_attentions=True)

    pair.assert_equal()
    for mine, theirs in zip(pair.drafted.attentions, pair.plain.attentions, strict=True):
        for weights, expected in zip(mine, theirs, strict=True):
            assert (weights is None) == (expected is None)
            if weights is not None:
                torch.testing.assert_close(weights, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.families) for name in RECURRENT])
def test_rows_of_a_batch_keep_their_own_numbers_of_tokens(family: str) -> None:
    target = in_double(make_target(family))
    prompt = torch.cat([make_prompt(seed=row) for row in range(4)])
    mask = torch.ones_like(prompt)
    mask[-1, :4] = 0

    pair = runs.informed(target, RandomDrafter(num_nodes=8), prompt, attention_mask=mask)

    pair.assert_equal()
    assert len({row.num_accepted for row in pair.stats.rows}) > 1


def test_a_target_whose_mixers_cannot_read_again_is_not_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3_5")
    monkeypatch.setattr(recurrent.RecurrentStates, "_begin", lambda *_: None)  # as if they were not handed the cache

    assert probe(target).form == "plain"
    runs.both(target, RandomDrafter()).assert_equal(is_kept=False)


@pytest.mark.parametrize("kind", ["falcon", "eagle-1", "eagle-3", "medusa", "dflash"])
@pytest.mark.parametrize("family", [family for family in ("qwen3_5", "mamba2") if family in RECURRENT])
def test_drafters_are_made_for_targets_with_recurrent_layers(family: str, kind: str) -> None:
    target = in_double(make_target(family))

    pair = runs.informed(target, every_drafter(kind, target))

    pair.assert_equal()
