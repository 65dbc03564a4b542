"""Batches: a tree for each row, rows that keep different numbers of tokens and end at different times."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from tests import runs
from tests.batches import LENGTHS, Prompts, batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter, RandomGenerator
from tests.generation.capture.test_acceptor import DrawingCriterion
from tests.tiny import (
    CHAIN_FAMILIES,
    TREE_FAMILIES,
    in_double,
    make_drafter,
    make_prompt,
    make_target,
)
from transformers_falcon_spec.core.sampling import GeneratorDraws, row_seeds
from transformers_falcon_spec.generation.acceptors import NodeScores
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.output import observe_steps

EAGER = ("gemma2", "bloom", "mpt")  # whose attention gives NaN at padding in double precision: rows then keep in step


@pytest.mark.parametrize("family", [*TREE_FAMILIES, *CHAIN_FAMILIES])
def test_greedy_rows_are_those_of_a_plain_batch(family: str) -> None:
    target = make_target(family, seed=3)
    pair = batch_and_drafted(target if family in EAGER else target.double(), max_new_tokens=30)

    pair.assert_equal()
    assert len(pair.stats.rows) == len(LENGTHS)
    assert all(row.acceptance_length > 1.2 for row in pair.stats.rows)
    assert len({row.num_accepted for row in pair.stats.rows}) > 1  # acceptance was uneven


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_falcon_drafts_for_all_rows(block_size: int, recurrence: str) -> None:
    target = make_target().double()
    tree = {"parents": [-1, 0, 0, 1, 1, 2, 3, 3, 6, 8], "ranks": [-1, 0, 1, 0, 1, 0, 0, 1, 0, 0]}
    drafter = make_drafter(target, block_size=block_size, recurrence=recurrence, draft_tree=tree, num_hidden_layers=2)

    pair = batch_and_drafted(target, drafter, lengths=(12, 2, 9, 3), max_new_tokens=30)

    pair.assert_equal()
    assert all(row.acceptance_length > 1.1 for row in pair.stats.rows)


@pytest.mark.parametrize("eos_column", [3, 8, 15])
def test_rows_end_at_their_own_eos_and_are_padded(eos_column: int) -> None:
    target = make_target().double()
    ends = (
        runs.plain(target, Prompts.of().ids, attention_mask=Prompts.of().mask).sequences[:, 12 + eos_column].tolist()
    )

    pair = batch_and_drafted(target, eos_token_id=[*ends[:3], 96], max_new_tokens=30)

    pair.assert_equal()
    lengths = [(row != 0).sum() for row in pair.drafted.sequences]
    assert len(set(map(int, lengths))) > 1


@pytest.mark.parametrize("num_ending", [1, 3, 4])
def test_rows_may_end_with_the_token_of_the_prefill(num_ending: int) -> None:
    target = make_target(seed=7).double()  # whose last row goes on to the limit when the first three end
    text = runs.plain(target, Prompts.of().ids, attention_mask=Prompts.of().mask, max_new_tokens=1).sequences

    pair = batch_and_drafted(
        target, make_drafter(target, block_size=2), eos_token_id=text[:num_ending, -1].tolist(), output_scores=True
    )

    pair.assert_equal(is_kept=num_ending < 4)  # once all rows have ended there is nothing to draft
    assert len(pair.drafted.scores) == len(pair.plain.scores)
    assert all(not scores[0].any() for scores in pair.drafted.scores[1:])  # of a row that has ended


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 5, 2), (30, 1)])
def test_a_prompt_may_be_one_token(lengths: tuple[int, ...], family: str) -> None:
    target = make_target(family).double()

    batch_and_drafted(target, make_drafter(target, block_size=2), lengths=lengths).assert_equal()


@pytest.mark.parametrize("family", ["llama4", "mistral"])
def test_a_prompt_may_be_read_in_chunks(family: str) -> None:
    target = in_double(make_target(family))

    batch_and_drafted(target, make_drafter(target, block_size=2), prefill_chunk_size=5).assert_equal()


@pytest.mark.parametrize("kind", ["right", "inner"])
@pytest.mark.parametrize("family", ["llama", "llama4", "mistral", "gpt_neo", "mpt", "bloom"])
def test_padding_may_stand_anywhere(family: str, kind: str) -> None:
    target = in_double(make_target(family, seed=3))
    ids, mask = torch.cat([make_prompt(12, seed) for seed in range(4)]), torch.ones(4, 12, dtype=torch.long)
    for row, columns in enumerate([(8, 12), (10, 12), (12, 12)] if kind == "right" else [(3, 7), (0, 2), (5, 6)]):
        mask[row, slice(*columns)] = 0
    gold = runs.plain(target, ids, attention_mask=mask, max_new_tokens=30).sequences
    drafter = InformedDrafter(make_drafter(target, block_size=2), gold, mask=mask)

    ours = runs.drafted(target, drafter, ids, attention_mask=mask, max_new_tokens=30)

    assert ours.sequences.tolist() == gold.tolist()
    keeps_in_step = family != "llama"  # the others count the gaps, or may: windows, chunks, chains
    assert (ours.speculation.num_accepted > 0) != keeps_in_step
    said = "rows must keep in step, as `attention_mask` leaves out tokens in the middle of the text"
    assert keeps_in_step == any(said in note for note in ours.speculation.notes)


@pytest.mark.parametrize(("family", "name"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_a_row_that_ended_is_not_read_behind_the_last_position(family: str, name: str) -> None:
    pair = batch_and_drafted(make_target(family, **{name: 32}).double(), lengths=(12,) * 4, max_new_tokens=21)

    pair.assert_equal()
    assert pair.drafted.sequences.shape[1] == 33  # the last token is never read


def test_all_rows_may_share_their_positions() -> None:
    target, ids = make_target().double(), torch.cat([make_prompt(12, seed) for seed in range(3)])

    runs.informed(target, RandomDrafter(), ids, position_ids=torch.arange(12)[None]).assert_equal()


def test_rows_that_ended_get_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts, propose = make_target().double(), Prompts.of(), RandomGenerator.propose
    text = runs.plain(target, prompts.ids, attention_mask=prompts.mask).sequences
    ends, seen = text[:2, [14, 18]].diagonal().tolist(), []

    def watched(self: RandomGenerator, budget: DraftBudget) -> Any:
        newest = [
            int(ids[num - 1]) for ids, num in zip(self.commits[-1].sequence_ids, self.commits[-1].lengths, strict=True)
        ]
        seen.extend(zip(newest, budget.depths, strict=True))
        return propose(self, budget)

    monkeypatch.setattr(RandomGenerator, "propose", watched)
    with observe_steps(lambda *_: None):  # else they leave
        batch_and_drafted(target, eos_token_id=ends)

    assert {depth for newest, depth in seen if newest in ends} == {0}
    assert any(depth > 0 for newest, depth in seen if newest not in ends)


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel"])
def test_a_sampled_row_is_its_single_row_run_with_its_own_generator(
    verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_target().double(), Prompts.of()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.verifier = verifier
    options = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 20}
    together = runs.drafted(target, drafter, prompts.ids, attention_mask=prompts.mask, **options).sequences

    torch.manual_seed(0)
    seeds = row_seeds(len(LENGTHS))
    for row, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(seeds[row])
        if verifier == "token_matching":
            draws = GeneratorDraws(generator)
            monkeypatch.setattr(
                "transformers_falcon_spec.generation.sequence_batch.GeneratorDraws", lambda draws=draws: draws
            )
        else:
            from transformers_falcon_spec.core.sampling import CoupledDraws  # noqa: PLC0415

            coupled = CoupledDraws(seeds[row])
            monkeypatch.setattr(CoupledDraws, "from_global_stream", lambda coupled=coupled: coupled)
        alone = runs.drafted(target, drafter, prompts.ids[row : row + 1, -length:], **options).sequences
        assert together[row, 12:].tolist() == alone[0, length:].tolist()


def test_a_batch_takes_one_draw_from_the_global_stream() -> None:
    target, prompts = make_target().double(), Prompts.of()
    runs.drafted(target, RandomDrafter(), prompts.ids, attention_mask=prompts.mask, do_sample=True)
    after = torch.get_rng_state()

    torch.manual_seed(0)
    torch.randint(2**62, (1,))

    assert after.equal(torch.get_rng_state())


@pytest.mark.parametrize("verifier", ["recursive_rejection", "traversal"])
def test_rejection_rules_verify_every_row(verifier: str) -> None:
    target, prompts = make_target().double(), Prompts.of()
    drafter = make_drafter(target, block_size=2, draft_tree={"parents": [-1, 0, 0, 1, 1], "ranks": [-1, 0, 1, 0, 1]})
    drafter.generation_config.verifier = verifier

    out = runs.drafted(target, drafter, prompts.ids, attention_mask=prompts.mask, do_sample=True, top_k=5)

    assert out.sequences.shape == (4, 36)
    assert all(row.num_accepted > 0 for row in out.speculation.rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_choosing_ahead_writes_the_same_text_from_the_same_stream(
    num_rows: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, lengths = make_target().double(), LENGTHS[:num_rows]
    options = {"do_sample": do_sample, "temperature": 0.8, "top_p": 0.9, "lengths": lengths}
    slow = batch_and_drafted(target, **options)
    calls = []

    def choose_all(self: NodeScores, start: int) -> None:
        calls.append(self)
        original(self, start)

    original = NodeScores.choose_all
    monkeypatch.setattr(NodeScores, "choose_all", choose_all)
    monkeypatch.setattr(NodeScores, "is_on_accelerator", True)
    fast = batch_and_drafted(target, **options)

    assert calls
    assert fast.drafted.sequences.tolist() == slow.drafted.sequences.tolist()
    assert fast.drafted_state.equal(slow.drafted_state)
    assert fast.stats.num_accepted == slow.stats.num_accepted > 0


def test_tokens_chosen_ahead_of_a_criterion_that_draws_are_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeScores, "is_on_accelerator", True)
    target, prompt = make_target().double(), make_prompt()
    options = {"do_sample": True, "temperature": 0.8, "stopping_criteria": StoppingCriteriaList([DrawingCriterion()])}
    text = runs.plain(target, prompt, **options).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(tune=False), text), prompt, **options)

    pair.assert_equal()


def test_lookahead_nodes_are_not_offered() -> None:
    out = runs.drafted(make_target(), RandomDrafter(num_nodes=8, num_lookahead=7))

    assert out.speculation.num_drafted > 0
    assert out.speculation.offered_by_depth == []


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("verifier", ["token_matching", "gumbel"])
def test_every_row_is_promised_the_noise_that_its_own_tokens_are_drawn_with(
    verifier: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised: list[torch.Tensor] = []
    propose = RandomGenerator.propose

    def look_ahead(self: RandomGenerator, budget: DraftBudget) -> Any:
        if not promised:
            assert budget.noise is not None
            promised.extend(budget.noise(row, 1) for row in range(num_rows))
        return propose(self, budget)

    monkeypatch.setattr(RandomGenerator, "propose", look_ahead)
    prompts, drafter = Prompts.of((5,) * num_rows), RandomDrafter(tune=False)
    drafter.generation_config.verifier = verifier

    out = runs.drafted(
        make_target(), drafter, prompts.ids, attention_mask=prompts.mask, **runs.SAMPLING, output_scores=True
    )

    for row, noise in enumerate(promised):  # the root is the first new token, so depth 1 is the second
        best = (torch.softmax(out.scores[1][row], dim=-1) / noise).argmax()
        assert best == out.sequences[row, 5 + 1]
    assert num_rows == 1 or not promised[0].equal(promised[1])
